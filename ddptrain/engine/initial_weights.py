"""Weights that a new run starts from (``init.weights``): where they come from, and what of them fits."""

import importlib
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from ddptrain.api.world import World
from ddptrain.config.schema import Config, Init
from ddptrain.distributed.comm import on_all_ranks, once_a_node
from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.saved_checkpoint import read, unpack
from ddptrain.errors import UserError
from ddptrain.text import first_few

log = logging.getLogger("ddptrain")

Weights = Mapping[str, Tensor]
_INSIDE = ("state_dict", "model_state_dict", "model_ema", "model", "weights", "params")
"""Where other programs' checkpoints keep the weights."""
_PREFIX = re.compile(r"^(module|_orig_mod|model)\.")
"""Of DataParallel and DDP, of torch.compile, and of Lightning and others."""
_MOST_WRAPPERS = 3
_LEAST_SHARE = 0.5
"""Of the model's numbers that have to be found; with fewer it is probably another model's file."""


def load_initial_weights(config: Config, model: nn.Module, world: World) -> None:
    """Put what ``init.weights`` names into a new model, and log what fitted. Collectives: it is downloaded
    once a node, and all ranks learn of one that can't read it.

    Raises UserError where there is no such file, or it is another model's.
    """
    if config.init.weights is None:
        return
    source = config.init.weights
    found = on_all_ranks(world, lambda: read_weights(source, config.model or {}, world))
    matched = match(model, found, config.init)
    model.load_state_dict({**model.state_dict(), **matched.loaded})
    for line in matched.lines():
        log.info("weights    %s", line)


@dataclass(frozen=True, slots=True)
class Matched:
    """Which of a model's weights a file has."""

    source: str
    loaded: dict[str, Tensor]
    share: float
    """Of the model's numbers, in [0, 1]."""
    other_size: list[str]
    missing: list[str]
    skipped: list[str]
    unused: list[str]
    """Names in the file alone."""

    def lines(self) -> list[str]:
        """For the log."""
        parts = {
            "left out, of another size, so random": self.other_size,
            "left out by init.skip": self.skipped,
            "not there, so random": self.missing,
            "there, but not in this model": self.unused,
        }
        told = [f"{len(names)} {what}: {first_few(names, 4)}" for what, names in parts.items() if names]
        share = f"{min(self.share, 0.999):.1%}" if self.share < 1 else "100%"
        return [f"{self.source}: {len(self.loaded)} tensors, {share} of the model", *told]


def match(model: nn.Module, found: Weights, init: Init) -> Matched:
    """Compare a file's weights with a model's. Raises UserError where little or nothing fits."""
    source, own = f"init.weights={init.weights}", _tensors(model.state_dict())
    for pattern in init.skip:
        if not any(fnmatchcase(name, pattern) for name in own):
            raise UserError(f"init.skip={pattern}: matches no name; there are {first_few(list(own), 4)}.")
    skipped = [name for name in own if any(fnmatchcase(name, pattern) for pattern in init.skip)]
    wanted = {name: value for name, value in own.items() if name not in skipped}
    found = _without_prefix(found, own)
    same = {name: found[name] for name in wanted if name in found and found[name].shape == wanted[name].shape}
    other_size = [
        f"{name} {tuple(found[name].shape)} there, {tuple(wanted[name].shape)} here"
        for name in wanted
        if name in found and name not in same
    ]
    sizes = {name: value.numel() for name, value in wanted.items()}
    share = sum(sizes[name] for name in same) / max(1, sum(sizes.values()))
    if share < _LEAST_SHARE:
        differ = other_size or [
            f"{name} there, {mine} here" for name, mine in zip(found, wanted, strict=False)
        ]
        raise UserError(
            f"{source}: fits only {share:.1%} of the model, so it is probably another model's:"
            f" {first_few(differ, 3)}. This model is {type(model).__name__}; choose the one that the"
            " weights were trained as (model.name=...), or name what is to stay random: init.skip=[pattern]."
        )
    missing = [name for name in wanted if name not in found]
    unused = [name for name in found if name not in own]
    return Matched(source, same, share, other_size, missing, skipped, unused)


def read_weights(source: str, model: Mapping[str, Any], world: World) -> Weights:
    """The tensors of a source, by name. model: the config's node, which says whose weights a library has."""
    library = "timm" if "timm" in str(model.get("_target_")) else "torchvision"
    if source == "default":
        source = {"timm": "timm:default", "torchvision": "torchvision:DEFAULT"}[library]
    kind, separator, name = source.partition(":")
    if kind in ("timm", "torchvision") and separator and kind != library:
        raise UserError(
            f"init.weights={source}: the model is of {library}. init.weights=default takes that one's own."
        )
    if separator and kind in _LIBRARIES:
        return _LIBRARIES[kind](name, model, world)
    path = Path(source)
    if not path.exists():
        raise UserError(
            f"init.weights={source}: does not exist. Name a run's folder, a checkpoint's, a .pt, .pth or"
            " .safetensors file, default (the library's own), torchvision:<name>, timm:<tag> or hub:<name>;"
            " or null for random weights."
        )
    return _of_folder(path) if path.is_dir() else _of_file(path)


def _of_folder(path: Path) -> Weights:
    """Of a checkpoint, or of a run's best, or else newest; the averaged ones where there are some."""
    if (path / "checkpoints").is_dir():
        best = path / "checkpoints" / "best"
        saved = read(best) if best.is_dir() else Checkpointer(path / "checkpoints", keep=1).newest()
        if saved is None:
            raise UserError(f"init.weights={path}: holds no checkpoint yet.")
    else:
        saved = read(path)
    return _inside(unpack(saved), str(saved.path))


def _of_file(path: Path) -> Weights:
    if path.suffix == ".safetensors":
        return _safetensors(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise UserError(
            f"init.weights={path}: holds more than tensors (a pickled model, say), which could run any code."
            " Save its state_dict() instead."
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise UserError(f"init.weights={path}: can't be read as weights ({error}).") from error
    return _inside(found, str(path))


def _safetensors(path: Path) -> Weights:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise UserError(
            f"init.weights={path}: needs safetensors: pip install 'ddptrain[safetensors]'"
        ) from error
    try:
        loaded: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"init.weights={path}: can't be read as weights ({error}).") from error
    return loaded


def _inside(found: Any, where: str) -> Weights:
    """The weights in what a file holds, as they are or under one of the usual names."""
    if isinstance(found, Mapping):
        average = found.get("average")
        if isinstance(average, Mapping) and average.get("weights"):
            return _tensors(average["weights"])
        if tensors := _tensors(found):
            return tensors
        for name in _INSIDE:
            if name in found:
                return _inside(found[name], where)
    raise UserError(
        f"init.weights={where}: holds no weights, as they are or under {', '.join(_INSIDE)}. Save the model's"
        " state_dict()."
    )


def _tensors(found: Mapping[Any, Any]) -> dict[str, Tensor]:
    return {
        name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, Tensor)
    }


def _without_prefix(found: Weights, own: Weights) -> Weights:
    """The names as the model has them: without what wrappers have put before them."""
    candidates = [found]
    for _ in range(_MOST_WRAPPERS):
        candidates.append({_PREFIX.sub("", name): value for name, value in candidates[-1].items()})
    return max(candidates, key=lambda names: len(names.keys() & own.keys()))


def _torchvision(name: str, model: Mapping[str, Any], world: World) -> Weights:
    from torchvision.models import get_model_weights

    key = f"init.weights=torchvision:{name}"
    try:
        known = get_model_weights(str(model.get("name")))
    except ValueError as error:
        raise UserError(
            f"{key}: is for model=torchvision or model=segmentation, whose model.name says which."
        ) from error
    if name not in known.__members__:
        raise UserError(
            f"{key}: torchvision has no such weights of {model['name']}; there are"
            f" {', '.join(known.__members__)}."
        )
    weights = known[name]
    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(weights.url).name

    def fetched() -> Weights:
        # torchvision's own way loads without weights_only, and so runs what the file says
        state: Weights = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
        return state

    return _downloaded(fetched, key, f"{weights.url} as {file}", world)


def _timm(name: str, model: Mapping[str, Any], world: World) -> Weights:
    key, hub = f"init.weights=timm:{name}", "the Hugging Face hub"
    timm = _imported("timm", key)
    full = str(model.get("name")) if name == "default" else f"{model.get('name')}.{name}"
    if not timm.is_model(str(model.get("name"))):
        raise UserError(f"{key}: is for model=timm, whose model.name says which model.")

    def fetched() -> Weights:
        state: Weights = timm.create_model(full, pretrained=True).state_dict()
        return state

    return _downloaded(fetched, key, f"a file of {hub} anywhere, and name that: init.weights=<file>", world)


def _hub(name: str, model: Mapping[str, Any], world: World) -> Weights:
    key = f"init.weights=hub:{name}"
    hub = _imported("huggingface_hub", key)

    def fetched() -> Weights:
        return _safetensors(Path(hub.hf_hub_download(name, "model.safetensors")))

    return _downloaded(fetched, key, f"model.safetensors of {name} anywhere, and name that", world)


def _imported(package: str, key: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(f"{key}: needs {package}: pip install 'ddptrain[timm]'") from error


def _downloaded(fetched: Callable[[], Weights], key: str, by_hand: str, world: World) -> Weights:
    """What a library fetches into its cache: by one rank of a node, and then read by all."""

    def attempt() -> Weights:
        try:
            return fetched()
        except (OSError, RuntimeError, ValueError, UnpicklingError) as error:  # not there; other bytes
            raise UserError(
                f"{key}: can't be had ({error}). Without a network, put {by_hand}."
                " Or start from random weights: init.weights=null."
            ) from error

    def fill_cache() -> None:
        attempt()

    once_a_node(world, fill_cache)
    return attempt()


_LIBRARIES: dict[str, Callable[[str, Mapping[str, Any], World], Weights]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "hub": _hub,
}
