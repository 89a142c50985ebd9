"""``--explain KEY``: which of the files and words a command line is made of has set a key, and what to.

By Hydra's own defaults list, which is in no public module of it (1.3.8).
"""

import ast
import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import Overrides
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from ddptrain.config.arguments import GROUPS
from ddptrain.config.augment_group import Tree
from ddptrain.config.limits import few_interpolations
from ddptrain.config.removed import what_to_use
from ddptrain.config.schema import Config, Rule
from ddptrain.config.search_path import CONF
from ddptrain.errors import UserError
from ddptrain.keys import did_you_mean, flat_keys
from ddptrain.text import in_columns

_ROOT = "config"
_SCHEMA = "_schema_"
_WORDS = "command line"
_ABSENT = object()


class _Layer(NamedTuple):
    """One file, or the schema, in the order in which they are merged."""

    name: str
    """Hydra's: ``optim/adamw``."""
    where: str
    """Ours: ``conf/optim/adamw.yaml``."""
    tree: Mapping[str, Any]
    parent: str
    """The name of the layer whose defaults include it."""


class _Setting(NamedTuple):
    where: str
    what: str


def explained(
    key: str, overrides: Sequence[str], placed: Callable[[DictConfig, Mapping[str, Any]], Tree]
) -> str:
    """Lines that say the value of a key and what set it, the oldest first; for a section, each of its keys
    and what set it last. placed: as ``ddptrain.config.compose`` has it.

    Raises UserError where there is no such key, and Hydra's own exceptions for what can't be composed.
    """
    words = list(overrides)
    with hydra_loader() as loader:
        composed = loader.load_configuration(_ROOT, words, RunMode.RUN)
        defaults = loader.compute_defaults_list(_ROOT, words, RunMode.RUN)
        layers = _layers(loader, words)
    with open_dict(composed):
        del composed["hydra"]
        composed["recipe"] = defaults.overrides.known_choices.get("recipe") or "???"
    raw, merged = plain_tree(composed, resolve=False), plain_tree(composed, resolve=True)
    with hydra_loader():
        final = placed(composed, defaults.overrides.known_choices)
    moved = bool(merged["augment"]) and final["data"].get("augment") == merged["augment"]
    final = {**final, "augment": merged["augment"]} if moved else final
    value = _at(final, key)
    if value is _ABSENT:
        raise UserError(no_such_key(key, flat_keys(raw)))
    choices = {group: _choice(group, defaults.overrides, layers) for group in GROUPS}
    history = _History(layers, defaults.config_overrides, choices, moved, final["optim"] != merged["optim"])
    rows: list[tuple[str, ...]]
    if _is_section(value):
        lines = [f"{key} = {choices[key].what} ({choices[key].where})"] if key in choices else []
        leaves = [leaf for leaf in flat_keys(value, f"{key}.") if not _is_section(_at(final, leaf))]
        rows = [(leaf, _as_word(_at(final, leaf)), history.nearest(leaf)[-1].where) for leaf in leaves]
    else:
        unresolved, about = _at(raw, key), _documentation(key)
        looked_up = isinstance(unresolved, str) and "${" in unresolved
        shown = f"{_as_word(value)}  ({unresolved})" if looked_up else _as_word(value)
        lines = [f"{key} = {shown}", *([f"  {about}"] if about else [])]
        rows = [*history.nearest(key)]
    return "\n".join([*lines, *(f"  {row}" for row in in_columns(rows))])


def no_section(overrides: Sequence[str]) -> str:
    """What to say where a file gives a value to a key that has keys below it; '' where none does."""
    with hydra_loader() as loader:
        layers = _layers(loader, overrides)
    sections: dict[str, str] = {}
    for layer in layers:
        for key in flat_keys(layer.tree):
            value = _at(layer.tree, key)
            if isinstance(value, Mapping):
                sections.setdefault(key, layer.where)
            elif key in sections and value is not None and not str(value).startswith(("${", "???")):
                hint = f" To choose one by its name, write in defaults: - override /{key}: ..."
                return (
                    f"{layer.where}: {key}: {_as_word(value)}: must hold keys and their values."
                    f"{hint if key in GROUPS else ''}"
                )
    return ""


@contextmanager
def hydra_loader() -> Iterator[ConfigLoaderImpl]:
    """Inside, Hydra composes of our YAMLs."""
    before = GlobalHydra.instance().hydra  # a program's own
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_module(CONF, version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            assert isinstance(loader, ConfigLoaderImpl)
            yield loader
    finally:
        GlobalHydra.instance().hydra = before


def _layers(loader: ConfigLoaderImpl, words: Sequence[str]) -> list[_Layer]:
    """The files that these words choose, in the order in which they are merged."""
    _, repo = loader._parse_overrides_and_create_caching_repo(_ROOT, list(words))
    return [
        _layer(default, loader._load_single_config(default, repo))
        for default in loader.compute_defaults_list(_ROOT, list(words), RunMode.RUN).defaults
        if not (default.config_path or "").startswith("hydra/")
    ]


def no_such_key(key: str, known: Sequence[str]) -> str:
    """What to say of a key that is none of those of a config."""
    node, _, last = key.rpartition(".")
    is_node = f"{node}._target_" in known or (node in known and last == "_target_")
    add = ""
    if is_node:
        below = (name.removeprefix(f"{node}.") for name in known if name.startswith(f"{node}."))
        beside = ", ".join(sorted({name.partition(".")[0] for name in below} - {"_target_"}))
        has = f" {node} has {beside}." if beside else ""
        add = f"{has} If what is made there takes it, add it: +{key}=..."
    inner = [
        name for name in known if name.startswith(f"{key.partition('.')[0]}.") and name.endswith(f".{last}")
    ]
    here = f" Did you mean {inner[0]}?" if len(inner) == 1 and "." in key else ""
    section = key.partition(".")[0]
    near = did_you_mean(key, known)
    if section in known and f" {section}." not in near:
        near = ""  # of another section, though this one is right
    hint = what_to_use(key) or (here or _choices_with(key) or near) + add
    return f"{key}: there is no such key.{hint}"


def _choices_with(key: str) -> str:
    """A sentence that names the choices of the key's group which have it, or ''."""
    group, _, inner = key.partition(".")
    if group not in GROUPS or not inner:
        return ""
    choices = []
    for path in sorted((Path(str(files(CONF))) / group).glob("*.yaml")):
        tree = OmegaConf.load(path)
        assert isinstance(tree, DictConfig)
        if inner in flat_keys(plain_tree(tree, resolve=False)):
            choices.append(f"{group}={path.stem}")
    has = "has" if len(choices) == 1 else "have"
    return f" {', '.join(choices)} {has} it; choose that too." if choices else ""


class _History(NamedTuple):
    """What has set which key: files, then words."""

    layers: Sequence[_Layer]
    words: Sequence[Override]
    choices: Mapping[str, _Setting]
    moved: bool
    """``augment`` takes the place of ``data.augment``."""
    replaced: bool
    """The command line chooses another optimizer than the recipe's, with its own arguments."""

    def nearest(self, key: str) -> list[_Setting]:
        """Of a key inside of what an interpolation has brought: what has set the interpolation."""
        settings = self.of(key)
        while not settings and "." in key:
            key = key.rpartition(".")[0]
            settings = self.of(key)
        return settings

    def of(self, key: str) -> list[_Setting]:
        key = key.removeprefix("data.") if self.moved and f"{key}.".startswith("data.augment.") else key
        layers = self.layers
        if self.replaced and key.startswith("optim."):
            own = [layer for layer in layers if layer.name.startswith("optim/")]
            layers = own if any(_at(layer.tree, key) is not _ABSENT for layer in own) else layers
        settings = [
            _Setting(layer.where, _as_word(value))
            for layer in layers
            if (value := _at(layer.tree, key)) is not _ABSENT and not _is_section(value)
        ]
        if key == "recipe":
            settings.append(self.choices[key])
        for word in self.words:
            path, _, inside = key.removeprefix(word.key_or_group).partition(".")
            given = word.value()
            below = isinstance(given, Mapping) and _at(given, inside) is not _ABSENT
            if key.startswith(word.key_or_group) and not path and (not inside or below):
                settings.append(_Setting(_WORDS, word.input_line or ""))
        return settings


def _layer(default: ResultDefault, loaded: ConfigResult) -> _Layer:
    name = default.config_path or ""
    assert isinstance(loaded.config, DictConfig)
    tree = plain_tree(loaded.config, resolve=False)
    if name == _SCHEMA:
        return _Layer(name, "default", tree, _ROOT)
    scheme, _, place = loaded.path.partition("://")
    if scheme == "pkg" and place == CONF:
        folder = Path("conf")
    else:
        folder = Path(str(files(place))) if scheme == "pkg" else Path(place)
    here = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    return _Layer(name, f"{here / name}.yaml", tree, default.parent or "")


def _choice(group: str, overrides: Overrides, layers: Sequence[_Layer]) -> _Setting:
    """Which YAML of a group was chosen, and by what."""
    chosen = overrides.override_metadata.get(group)
    names = [
        layer.name.removeprefix(f"{group}/")
        for layer in layers
        if layer.name.startswith(f"{group}/") and layer.parent == _ROOT  # not what a recipe includes
    ]
    choice = names[0] if len(names) == 1 else f"[{','.join(names)}]" if names else None
    if chosen is not None and chosen.external_override:
        return _Setting(_WORDS, f"{group}={choice}" if group == "recipe" else _as_word(choice))
    by = _ROOT if chosen is None else chosen.containing_config_path
    where = next((layer.where for layer in layers if layer.name == by), str(by))
    return _Setting(where, _as_word(choice))


def plain_tree(config: DictConfig, resolve: bool) -> dict[str, Any]:
    """Of a composed config, without Hydra's own section."""
    with few_interpolations():
        tree = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(tree, dict)
    return {str(name): value for name, value in tree.items() if name != "hydra"}


def _at(tree: Mapping[str, Any], key: str) -> Any:
    inner: Any = tree
    for name in key.split("."):
        if not isinstance(inner, Mapping) or name not in inner:
            return _ABSENT
        inner = inner[name]
    return inner


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value)


def _as_word(value: Any) -> str:
    """As one would write it on the command line."""
    if value == "???":
        return "(has to be given)"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _documentation(key: str) -> str:
    """A key's description in the schema, and its rule."""
    *sections, name = key.split(".")
    owner: Any = Config
    for section in sections:
        kind = {field.name: field.type for field in dataclasses.fields(owner)}.get(section)
        if not dataclasses.is_dataclass(kind):
            return ""
        owner = kind
    field = next((field for field in dataclasses.fields(owner) if field.name == name), None)
    if field is None:
        return ""
    rule = field.metadata.get("rule", Rule())
    rules = [f"{name} {bound:g}" for name, bound in rule.bounds.items()]
    rules = [f"one of {', '.join(rule.choices)}"] if rule.choices else rules
    return " ".join([*_written(owner, name), *([f"Must be {', '.join(rules)}."] if rules else [])])


@cache
def _written(owner: type, name: str) -> list[str]:
    """The words of the docstring below a field in the source."""
    body = ast.parse(inspect.getsource(owner)).body[0].body  # type: ignore[attr-defined]
    for field, below in pairwise(body):
        if isinstance(field, ast.AnnAssign) and ast.unparse(field.target) == name:
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            return str(below.value.value).split() if is_text else []
    return []
