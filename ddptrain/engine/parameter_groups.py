"""Which parameters are trained, and with which learning rate and weight decay."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ddptrain.errors import UserError
from ddptrain.keys import did_you_mean

KEYS = ("groups", "layer_decay")
"""Of the config's optim node; all others are arguments of the optimizer."""
_SETTINGS = ("lr", "weight_decay", "freeze")
_STACKS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters with the same settings."""

    name: str
    parameters: tuple[nn.Parameter, ...]
    lr_scale: float
    """Of ``optim.lr``."""
    weight_decay: float | None
    """None: ``optim.weight_decay``."""

    def __str__(self) -> str:
        count = sum(parameter.numel() for parameter in self.parameters)
        decay = "" if self.weight_decay is None else f", weight decay {self.weight_decay:g}"
        return f"{self.name}: lr x {self.lr_scale:g}{decay}, {count:,} parameters"


def check_groups(node: Mapping[str, Any]) -> list[str]:
    """What is wrong with ``optim.groups`` and ``optim.layer_decay``."""
    problems = []
    decay, groups = node.get("layer_decay"), node.get("groups") or []
    if decay is not None and not (_is_number(decay) and 0 < decay <= 1):
        problems.append(f"optim.layer_decay={decay}: must be a number above 0 and at most 1, or null.")
    if not isinstance(groups, list):
        return [*problems, f"optim.groups={groups}: must be a list: [{{params: <pattern>, lr: 0.1}}, ...]."]
    for number, group in enumerate(groups):
        key = f"optim.groups[{number}]"
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), str) or len(group) < 2:
            wanted = f"params: <name pattern>, and {' or '.join(_SETTINGS)}"
            problems.append(f"{key}={group}: must be {{{wanted}}}.")
            continue
        for name, value in group.items():
            where = f"{key}.{name}={value}"
            if name not in ("params", *_SETTINGS):
                hint = did_you_mean(str(name), _SETTINGS) or f" There are {', '.join(_SETTINGS)}."
                problems.append(f"{where}: there is no such setting.{hint}")
            elif name == "freeze" and not isinstance(value, bool):
                problems.append(f"{where}: must be true or false.")
            elif name in ("lr", "weight_decay") and not (_is_number(value) and value >= 0):
                problems.append(f"{where}: must be a number, 0 or more.")
        if group.get("lr") == 0:
            problems.append(f"{key}.lr=0: use freeze: true, which saves the backward pass, too.")
    return problems


def parameter_groups(
    model: nn.Module, optim: Mapping[str, Any], weight_decay_on: str = "all"
) -> list[ParameterGroup]:
    """The trained parameters by their settings, those at ``optim.lr`` first.

    Of ``optim.groups`` the last pattern that matches a name decides, for each setting by itself. Under
    ``optim.layer_decay`` a block's rate is that factor to the power of its distance from the output (Clark et
    al., arXiv 2003.10555, section 3; Bao et al., arXiv 2106.08254, use it for vision). Raises UserError where
    a pattern matches nothing.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    every = {n: p for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    decay = optim.get("layer_decay")
    depths = layer_depths(model) if decay is not None else {}
    settings: dict[str, dict[str, Any]] = {name: {} for name in trained}
    titles: dict[str, str] = {}
    for group in optim.get("groups") or []:
        pattern = group["params"]
        if "freeze" in group and not any(fnmatchcase(name, pattern) for name in every):
            continue
        for name in matching_parameters(pattern, every, f"optim.groups, params: {pattern}"):
            settings[name] |= group
            titles[name] = pattern
    alike: dict[tuple[str, float, float | None], list[str]] = {}
    for name, parameter in trained.items():
        wd = settings[name].get("weight_decay")
        if wd is None and weight_decay_on == "matrices" and parameter.ndim < 2:
            wd = 0.0
        scale = settings[name].get("lr", 1.0) * (decay or 1.0) ** depths.get(name, 0)
        alike.setdefault((titles.get(name, ""), scale, wd), []).append(name)
    groups = [
        ParameterGroup(title or _in_short(names), tuple(trained[name] for name in names), scale, wd)
        for (title, scale, wd), names in alike.items()
    ]
    return sorted(
        groups, key=lambda group: (group.lr_scale != 1, -group.lr_scale, group.weight_decay is not None)
    )


def _in_short(names: Sequence[str]) -> str:
    """``layer1.0.*``, or the first name where they have no module in common."""
    modules = [name.rpartition(".")[0].replace(".", "/") for name in names]
    common = os.path.commonpath(modules).replace("/", ".")
    return f"{common}.*" if common else f"{names[0]}{', ...' * (len(names) > 1)}"


def layer_depths(model: nn.Module) -> dict[str, int]:
    """The distance of each parameter's block from the output, in blocks, by the parameter's name.

    Blocks are what a stack (Sequential, ModuleList, ModuleDict) repeats: those of a transformer, of a
    ResNet's stages. What lies before the first one (patches, positions, a first convolution) is one more, and
    what follows the last one (a norm, the classifier) is the head, at 0. A model without blocks counts its
    layers instead.
    """
    places = {name: _block_of(model, name) for name, _ in model.named_parameters()}
    keys = [key for key, _ in places.values()]
    blocks = [key for key, is_block in places.values() if is_block] or keys
    order = {key: place for place, key in enumerate(dict.fromkeys(blocks), start=1)}
    last = keys[::-1].index(blocks[-1])
    place, depths = 0, {}
    for number, (name, key) in enumerate(zip(places, keys, strict=True)):
        place = order.get(key, place)
        depths[name] = len(order) + 1 if number >= len(keys) - last else place
    nearest = max(depths.values())
    return {name: nearest - place for name, place in depths.items()}


def _block_of(model: nn.Module, name: str) -> tuple[str, bool]:
    """The module that a parameter belongs to for `layer_depths`, and whether that is made of others."""
    module, path = model, ""
    for part in name.split("."):
        if module is not model and not _is_stack(module):
            return path, any(True for _ in module.children())
        path = f"{path}.{part}" if path else part
        children = dict(module.named_children())
        if part not in children:
            return path, False
        module = children[part]
    raise AssertionError(name)


def _is_stack(module: nn.Module) -> bool:
    """Whether blocks are looked for in a module."""
    stacks = (part for part in module.modules() if isinstance(part, _STACKS))
    return _kind(module) in _STACKS or any(map(_repeats, stacks))


def _repeats(stack: nn.Module) -> bool:
    made_of_others = [_kind(part) for part in stack.children() if any(True for _ in part.children())]
    return any(made_of_others.count(kind) > 1 for kind in made_of_others if not issubclass(kind, _STACKS))


def _kind(module: nn.Module) -> type:
    """The class as it is written, also where train.recompute has put a subclass in its place."""
    kind: type = getattr(module, "written_as", type(module))
    return kind


def matching(pattern: str, named: Collection[str], key: str, what: str = "parameter") -> set[str]:
    """The names that match. Raises UserError, which begins with ``key``, if there are none."""
    names = {name for name in named if fnmatchcase(name, pattern)}
    if not names:
        hint = did_you_mean(pattern, list(named)) or f" There are {', '.join(list(named)[:4])}, ..."
        raise UserError(f"{key}: matches the name of no {what}.{hint}")
    return names


def matching_parameters(pattern: str, named: Mapping[str, nn.Parameter], key: str) -> set[str]:
    """The parameters one of whose names matches, each by its first name. named: all names of each, as
    ``named_parameters(remove_duplicate=False)`` has them. Raises as `matching`."""
    first = {parameter: name for name, parameter in reversed(list(named.items()))}
    return {first[named[name]] for name in matching(pattern, named, key)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
