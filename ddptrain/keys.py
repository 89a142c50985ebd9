"""Keys: of overrides and of nested mappings, and the nearest known ones to a misspelt one."""

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that was probably meant, or '' where none is near.

    A name that is cut short is taken for the shortest that begins so. Keys of one section are compared by
    their last parts: the section that they share says nothing. So ``lr`` finds ``optim.lr``, too.
    """
    keys = sorted(set(known))
    if other_case := [key for key in keys if key.lower() == name.lower()]:
        return other_case[0]
    near = sorted((key for key in keys if len(name) > 2 and key.startswith(name)), key=len)
    section, _, last = name.rpartition(".")
    in_section = {
        key.rpartition(".")[2]: key for key in keys if section and key.rpartition(".")[0] == section
    }
    near = near or [in_section[match] for match in difflib.get_close_matches(last, in_section, 1, 0.5)]
    others = [key for key in keys if key not in in_section.values()]
    near = near or difflib.get_close_matches(name, others, n=1)
    near = near or [key for key in keys if key.rpartition(".")[2] == last]
    return near[0] if near else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that names the `nearest`, or ''."""
    near = nearest(name, known)
    return f" Did you mean {near}?" if near else ""


def did_you_mean_path(path: Path) -> str:
    """The same for a path of which there is none, among what lies in its folder."""
    others = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(path.name, others)
    return f" Did you mean {path.parent / near}?" if near else ""


def is_secret(name: str) -> bool:
    """Whether the value of a key or variable with this name is for nobody to see."""
    return re.search(r"(KEY|TOKEN|PASSWORD|SECRET)S?$", name.upper()) is not None


def key_of(word: str) -> str:
    """The key that an override is of: ``+optim.lr=1`` is of ``optim.lr``."""
    return word.lstrip("+~").partition("=")[0]


def flat_values(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested mapping by their dotted keys."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        values |= flat_values(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}
    return values


def flat_keys(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Every dotted key of a nested mapping, sections included."""
    keys = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        keys.append(key)
        if isinstance(value, Mapping):
            keys.extend(flat_keys(value, f"{key}."))
    return keys
