"""Facts as JSON, and back: what somebody's doctor has seen can be judged on another machine."""

import dataclasses
import json
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ddptrain.doctor.facts import Cluster, Facts
from ddptrain.errors import UserError
from ddptrain.text import parse_json

Fact = TypeVar("Fact")


def plain(fact: Any) -> Any:
    """As JSON writes it."""
    return json.loads(json.dumps(dataclasses.asdict(fact)))


def restored(kind: Any, value: Any, where: str) -> Any:
    """A value of JSON's as the type that it was. Raises UserError where it is not of that type."""
    options = [part for part in get_args(kind) if part is not type(None)]
    if get_origin(kind) in (Union, UnionType):
        return None if value is None else restored(options[0], value, where)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, _expected(dict, value, where), where)
    if get_origin(kind) is tuple:
        values = _expected(list, value, where)
        kinds = [options[0]] * len(values) if Ellipsis in options else options
        if len(kinds) != len(values):
            raise UserError(f"{where}={value}: must be a list of {len(kinds)}.")
        return tuple(
            restored(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, values, strict=True))
        )
    if get_origin(kind) is dict:
        return {
            key: restored(str, text, f"{where}.{key}") for key, text in _expected(dict, value, where).items()
        }
    if kind is float and type(value) is int:
        return float(value)
    return _expected(kind, value, where)


def read_facts(path: Path) -> Facts | Cluster:
    """What ``doctor --json`` printed: all of it, or its facts only."""
    try:
        found = parse_json(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"facts={path}: must be what python -m ddptrain doctor --json printed: {error}."
        ) from error
    inner = found.get("facts", found) if isinstance(found, dict) else found
    kind = Cluster if isinstance(inner, dict) and "nodes" in inner else Facts
    facts: Facts | Cluster = restored(kind, inner, f"facts={path}: facts")
    return facts


def _dataclass(kind: Any, values: dict[str, Any], where: str) -> Any:
    types = get_type_hints(kind)
    missing = dataclasses.MISSING
    needed = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is missing]
    for name in [*(n for n in values if n not in types), *(n for n in needed if n not in values)]:
        raise UserError(
            f"{where}.{name}: {'is missing' if name in types else 'is no fact that this version knows'}."
            " Replay a file with the version of ddptrain that wrote it (facts.system.ddptrain)."
        )
    return kind(**{name: restored(types[name], value, f"{where}.{name}") for name, value in values.items()})


def _expected(kind: type[Fact], value: Any, where: str) -> Fact:
    if type(value) is not kind:
        raise UserError(f"{where}={json.dumps(value)[:80]}: must be of the type {kind.__name__}.")
    return value
