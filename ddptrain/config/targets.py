"""What a config may name by ``_target_``: the allow list, and whether a name keeps to it."""

import importlib
import inspect
import pkgutil
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from ddptrain.errors import UserError
from ddptrain.keys import did_you_mean

Node = Mapping[str, Any]

OURS = (
    "ddptrain.strategies.",
    "ddptrain.observe.",
    "ddptrain.tools.sweep.pruning.",
    "ddptrain.tools.bench.pacing.",
    "ddptrain.tools.trackers.",
)
"""Where only strategies, observers and controllers are meant."""
_EXTENSION_POINTS = {
    "ddptrain.api.observer.Observer",
    "ddptrain.api.controller.Controller",
    "ddptrain.api.strategy.Strategy",
}
METRICS = (
    *("torchmetrics.classification.", "torchmetrics.regression.", "torchmetrics.segmentation."),
    *("torchmetrics.retrieval.", "torchmetrics.nominal."),
)
"""Of torchmetrics what computes; its other metrics load models."""
ALLOWED = (
    *("ddptrain.recipes.", "ddptrain.data.", "torch.nn.", "torch.optim.", "torchvision.models."),
    *("torchvision.transforms.v2.", "torchvision.datasets.", "ddptrain.engine.lr_schedules.", *OURS),
    *("timm.optim.", *METRICS),
)
FUNCTIONS_ALLOWED = (
    "ddptrain.recipes.",
    "ddptrain.strategies.auto.",
    "ddptrain.engine.lr_schedules.",
    "torchvision.models.",
)
LIBRARIES = ("torch.", "torchvision.", "torchmetrics.", "timm.")
_MODULES = ("torch.nn.", "torchvision.models.", "torchvision.transforms.v2.")
_UNPICKLES = "torchvision.datasets.lsun."
"""A list of keys that lies in the current folder; CIFAR-10's files are unpickled too, after their hashes."""
_LONGEST = 200
_ALIKE = 0.8
"""How like an allowed name's each part must be to have meant it (difflib's ratio)."""
_opened: dict[str, Path | None] = {}


def open_package(name: str, file: Path | None = None) -> None:
    """Let configs name what is defined in this top-level package or module of the user's. file: the one that
    is meant, where the process may have imported another of that name."""
    _opened[f"{name}."] = file


@contextmanager
def packages_restored() -> Iterator[None]:
    """What is opened inside, is not afterwards."""
    before = dict(_opened)
    try:
        yield
    finally:
        _opened.clear()
        _opened.update(before)


def resolve(node: Node, key: str) -> Callable[..., Any]:
    """What a node's ``_target_`` names, checked as written and as found. Raises UserError."""
    if not isinstance(node, Mapping):
        raise UserError(
            f"{key}={node}: must be a node with a _target_, as conf/{key.partition('.')[0]}/ has."
        )
    name = node.get("_target_")
    if not isinstance(name, str):
        raise UserError(f"{key}._target_: needs the dotted name of a class, not {name!r}.")
    if len(name) > _LONGEST:
        raise UserError(
            f"{key}._target_={name[:_LONGEST]}...: is no name; it is longer than {_LONGEST} letters."
        )
    if not _allowed(name, ALLOWED):
        if meant := _name_meant(name):
            raise UserError(f"{key}._target_={name}: there is no such name. Did you mean {meant}?")
        raise UserError(
            f"{key}._target_={name}: not allowed. If it is your own, name its folder: --config-dir=<folder>"
            " (or start in that folder, or install it as a package with the entry point group"
            f" ddptrain.conf). Allowed without are {', '.join(a + '*' for a in ALLOWED)}."
        )
    if any(part.startswith("_") for part in name.split(".")):
        raise UserError(f"{key}._target_={name}: names something private; name what is public.")
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"{key}._target_={name!r}: is no dotted name of a class.")
    target = _import(name, key)
    home = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}"
    # a function of a module, not a method: called as a function, that would take any object as its self
    plain_function = inspect.isfunction(target) and "." not in target.__qualname__
    if not (inspect.isclass(target) or (plain_function and _allowed(name, FUNCTIONS_ALLOWED))):
        raise UserError(f"{key}._target_={name}: must be a class, not {type(target).__name__}.")
    if not _allowed(home, ALLOWED):
        raise UserError(f"{key}._target_={name}: leads to {home}, which is not allowed.")
    if (wanted := _kinds_wanted_instead(target, home, key)) is not None:
        raise UserError(f"{key}._target_={name}: not allowed; of this package only {wanted}.")
    if inspect.isabstract(target):
        raise UserError(f"{key}._target_={name}: is an abstract class; name one that derives from it.")
    try:
        inspect.signature(target)
    except ValueError as error:  # classes written in C, metaclasses
        raise UserError(f"{key}._target_={name}: can't be built from a config.") from error
    return typing.cast(Callable[..., Any], target)


def result_type(target: Callable[..., Any]) -> type | None:
    """What calling a target gives, as far as it says so."""
    result = target if inspect.isclass(target) else hints_of(target).get("return")
    return result if inspect.isclass(result) else None


def _kinds_wanted_instead(target: Any, home: str, key: str) -> str | None:
    """What a library's or a recipe's name may stand for, where this one does not: much of what lies beside
    modules and optimizers reads files or calls what it is given."""
    from torch import nn, optim
    from torch.utils.data import Dataset

    from ddptrain.api.recipe import Data, Task

    result = result_type(target)
    if home.startswith(OURS):
        kinds = {f"{base.__module__}.{base.__qualname__}" for base in getattr(result, "__mro__", ())}
        return None if kinds & _EXTENSION_POINTS else "strategies, observers and controllers"
    if home.startswith(METRICS):
        from torchmetrics import Metric

        return None if inspect.isclass(target) and issubclass(target, Metric) else "metrics"
    if home.startswith("timm.optim."):
        sound = inspect.isclass(target) and issubclass(target, optim.Optimizer)
        return None if sound else "Optimizers"
    if home.startswith("torch.optim."):
        kind = optim.lr_scheduler.LRScheduler if key == "sched" else optim.Optimizer
        return None if inspect.isclass(target) and issubclass(target, kind) else f"{kind.__name__}s"
    if home.startswith("torchvision.datasets."):
        sound = inspect.isclass(target) and issubclass(target, Dataset) and not home.startswith(_UNPICKLES)
        return None if sound else "map-style datasets that check what they unpickle"
    if home.startswith(_MODULES) and inspect.isclass(target):
        return None if issubclass(target, nn.Module) else "modules"
    if home.startswith("torchvision.models."):
        builders = importlib.import_module("torchvision.models._api").BUILTIN_MODELS
        return None if target in builders.values() else "modules and the functions that make a named model"
    if home.startswith("ddptrain.recipes.") and not inspect.isclass(target):
        sound = result is not None and issubclass(result, nn.Module | Task | Data)
        return None if sound else "classes and functions that make a model, a task or data"
    return None


def _allowed(name: str, prefixes: Sequence[str]) -> bool:
    return name.startswith((*prefixes, *_opened))


def _name_meant(name: str) -> str | None:
    """The name that is allowed and differs from this one by a slip in what stands before the last parts."""
    parts, meant = name.split("."), []
    for prefix in (*_opened, *ALLOWED):
        known = prefix.rstrip(".").split(".")
        begins, rest = parts[: len(known)], parts[len(known) :]
        pairs = zip(known, begins, strict=False)
        alike = [SequenceMatcher(None, mine, theirs).ratio() for mine, theirs in pairs]
        if rest and min(alike) >= _ALIKE:
            meant.append((min(alike), ".".join([*known, *rest])))
    return max(meant, default=(0.0, None))[1]


def _import(name: str, key: str) -> Any:
    parts = name.split(".")
    for split in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:split])
        try:
            target: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
                continue
            raise  # the module exists, but something that it imports does not
        meant, imported = _opened.get(f"{parts[0]}."), getattr(sys.modules[parts[0]], "__file__", None)
        if meant is not None and imported is not None and Path(imported).resolve() != meant.resolve():
            raise UserError(
                f"{key}._target_={name}: {parts[0]} is imported from {imported} already, and not from"
                f" {meant}. Rename one of them, or do this in a process of its own."
            )
        for position, part in enumerate(parts[split:], split):
            if not hasattr(target, part):
                where = ".".join(parts[:position])
                modules = [module.name for module in pkgutil.iter_modules(getattr(target, "__path__", ()))]
                public = [n for n in (*vars(target), *modules) if not n.startswith("_")]
                raise UserError(f"{key}._target_={name}: {where} has no {part}.{did_you_mean(part, public)}")
            target = getattr(target, part)
        return target
    raise UserError(f"{key}._target_={name}: there is no module {parts[0]}.")


def hints_of(target: Callable[..., Any]) -> dict[str, Any]:
    function = target.__init__ if inspect.isclass(target) else target
    try:
        return typing.get_type_hints(function)
    except NameError:  # annotations that exist for type checkers only
        return {}
