"""The YAMLs in reach, by their names and first lines: for --help and completion, which do without Hydra."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddptrain.config.schema import Config
from ddptrain.errors import UserError
from ddptrain.keys import flat_values
from ddptrain.text import parse_yaml

ENTRY_POINTS = "ddptrain.conf"
"""Of installed packages with recipes: their packages of YAMLs."""


def yaml_folders(config_dirs: Sequence[Path]) -> list[Path]:
    """Ours, those of installed packages, and those of --config-dir, in the order in which Hydra looks."""
    own = Path(__file__).parents[1] / "conf"
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
    paths = {path.stem: path for folder in reversed(folders) for path in (folder / group).glob("*.yaml")}
    return dict(sorted(paths.items()))


def first_comment(path: Path) -> str:
    """The first line of a YAML that says what it is for; '' where none does."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.startswith("#"):
                break
            if not line.startswith("# @package"):
                return line.lstrip("# ").rstrip()
    return ""


def known_keys() -> list[str]:
    """The dotted keys of the schema, and then those of our own YAMLs: of models, data, optimizers."""
    keys = dict.fromkeys(_keys_of(Config))
    own = yaml_folders([])[0]
    for path in sorted(own.glob("*/*.yaml")):
        tree = parse_yaml(path.read_text(encoding="utf-8"))
        group = path.parent.name
        keys |= dict.fromkeys(flat_values(tree if group in tree or group == "recipe" else {group: tree}))
    return [key for key in keys if key.partition(".")[0] != "defaults" and not key.endswith("_")]


def _keys_of(section: Any, prefix: str = "") -> list[str]:
    keys = []
    for field in fields(section):
        inner = is_dataclass(field.type)
        keys += _keys_of(field.type, f"{prefix}{field.name}.") if inner else [f"{prefix}{field.name}"]
    return keys
