"""The YAMLs in reach, by their names and first lines: for --help and completion, which do without Hydra."""

from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import ddptrain
from ddptrain.errors import UserError

ENTRY_POINTS = "ddptrain.conf"
"""Of installed packages with recipes: their packages of YAMLs."""


def yaml_folders(config_dirs: Sequence[Path]) -> list[Path]:
    """Ours, those of installed packages, and those of --config-dir, in the order in which Hydra looks."""
    own = Path(ddptrain.__file__).parent / "conf"
    if not own.is_dir():
        raise UserError("ddptrain is not installed here: run pip install -e . in its checkout.")
    installed = []
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        package, *inner = entry.value.split(".")
        spec = find_spec(package)  # does not import it, which may take seconds
        installed += [Path(place, *inner) for place in (spec and spec.submodule_search_locations) or ()]
    return [own, *installed, *config_dirs]


def choices(group: str, folders: Sequence[Path]) -> dict[str, Path]:
    """The YAMLs of a group by their names, in the names' order."""
    found = {path.stem: path for folder in reversed(folders) for path in (folder / group).glob("*.yaml")}
    return dict(sorted(found.items()))


def first_comment(path: Path) -> str:
    """The first line of a YAML that says what it is for; '' where none does."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.startswith("#"):
                break
            if not line.startswith("# @package"):
                return line.lstrip("# ").rstrip()
    return ""
