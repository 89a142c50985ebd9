"""Where YAMLs are found (ours, those of installed packages, and folders, which may be a stranger's), and the
user's code that these may name."""

import re
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin

from ddptrain.config.arguments import GROUPS, TRUST
from ddptrain.config.choices import ENTRY_POINTS
from ddptrain.config.limits import guard_resolvers, named_defaults, read_config
from ddptrain.config.schema import Config
from ddptrain.config.targets import open_package
from ddptrain.errors import UserError

CONF = "ddptrain.conf"
"""Where our YAMLs are."""
_LIBRARIES = frozenset({"ddptrain", "torch", "torchvision", *sys.stdlib_module_names})
"""Never a user's own code, even where the current folder is a checkout of one of them."""
_PACKAGE = re.compile(r"pkg://\w+([./]\w+)*")
_named: list[tuple[str, str]] = []
"""What this command line names: who asked, and a folder:// or pkg://."""


def open_user_code(config_dirs: Sequence[Path], trusted: Sequence[str] = ()) -> None:
    """Let configs name code that the user put beside them (modules in the folder of --config-dir or the
    current folder), installed packages that carry recipes, and those that ``--trust`` names. Raises
    UserError where there is no such folder or package."""
    for name in trusted:
        if name in _LIBRARIES or find_spec(name) is None:
            why = "is never trusted as a whole" if name in _LIBRARIES else "is not installed"
            raise UserError(
                f"{TRUST} {name}: {why}. Name installed packages, whose classes configs may then name."
            )
        open_package(name)
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        open_package(entry.value.partition(".")[0])
    for folder in config_dirs:
        if not folder.is_dir():
            raise UserError(f"--config-dir={folder}: there is no such folder.")
        if (place := str(folder.resolve())) not in sys.path:
            sys.path.insert(0, place)
    for folder in (Path.cwd(), *config_dirs):
        entries = list(folder.iterdir()) if folder.is_dir() else []
        # a package after the module of its name: it is what Python imports
        for path in sorted(entries, key=lambda path: path.suffix != ".py"):
            file = path if path.suffix == ".py" else path / "__init__.py"
            if file.is_file() and path.stem.isidentifier() and path.stem not in _LIBRARIES:
                open_package(path.stem, file if folder in config_dirs else None)


def look_in(folders: Sequence[Path], places: Sequence[str], variables: Sequence[str]) -> None:
    """Compose from now on of our YAMLs, those of installed packages, these folders (of ``--config-dir``) and
    places (of ``hydra.searchpath``: folders, and packages as pkg://name), with harmless resolvers only.
    variables: of the environment, which the command line lets YAMLs read."""
    guard_resolvers(variables)
    ConfigStore.instance().store(name="_schema_", node=Config)
    plugins = Plugins.instance()
    # imported after Hydra's scan, which executes again what was imported before; it finds these in a wheel,
    # but not in an editable install
    from hydra_plugins.ddptrain_sweep.pool import GpuPool, Grid

    for plugin in (_Sources, _Folder, GpuPool, Grid):
        plugins.register(plugin)
    for folder in folders:
        _check_names(folder)
    _named[:] = [("--config-dir", f"folder://{folder.resolve()}") for folder in folders]
    for place in places:
        folder = Path(place.removeprefix("file://"))
        if _PACKAGE.fullmatch(place):
            _named.append(("hydra.searchpath", place))
        elif folder.is_dir():
            _named.append(("hydra.searchpath", f"folder://{folder.resolve()}"))
        else:
            raise UserError(f"hydra.searchpath: {place} is not available. Name a folder or package of YAMLs.")


def _check_names(folder: Path) -> None:
    """Raise UserError where a YAML would never be read: ours of that name is found first."""
    own = Path(str(files(CONF)))
    for group in GROUPS:
        for path in (folder / group).glob("*.yaml"):
            ours = own / group / path.name
            if ours.is_file() and ours.read_bytes() != path.read_bytes():
                raise UserError(
                    f"{path}: has the name of ddptrain's own {group}={path.stem}, which would be taken in its"
                    " place. Give it another name."
                )


class _Folder(FileConfigSource):
    """A folder of YAMLs, of which any may be a stranger's."""

    @staticmethod
    def scheme() -> str:
        return "folder"

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        if not path.is_file():
            raise ConfigLoadError(f"Config not found : {path}")
        config = read_config(path)
        try:
            header = self._get_header_dict(path.read_text()[:512])
        except ValueError as error:
            raise UserError(f"{path}: its first lines can't be read ({error}).") from error
        names = [config_path, header["package"] or "", *config, *named_defaults(config, path)]
        if any("hydra" in re.split(r"[^\w-]+", str(name)) for name in names):
            raise UserError(f"{path}: sets keys of Hydra's own (hydra...), which no recipe may; remove them.")
        if config_path.startswith("recipe/") and header["package"] is None:
            raise UserError(
                f"{path}: its first line must be `# @package _global_`, so that its sections are the run's."
            )
        return ConfigResult(self.provider, self.full_path(), config, header)


class _Sources(SearchPathPlugin):
    """Where to look besides our own YAMLs: packages with the entry point group ``ddptrain.conf``, whose value
    is a package of YAMLs, and what this command line names."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for entry in metadata.entry_points(group=ENTRY_POINTS):
            search_path.append(provider=entry.name, path=f"pkg://{entry.value}")
        for provider, path in _named:
            search_path.append(provider=provider, path=path)
