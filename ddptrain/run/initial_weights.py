"""Weights that a new run starts from (``init.weights``): where they come from, and what of them fits."""

import importlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from ddptrain.api.world import World
from ddptrain.distributed.comm import on_all_ranks, once_a_node
from ddptrain.errors import UserError, reason
from ddptrain.observe.mirror.layout import is_mirror
from ddptrain.observe.mirror.restore import local_copy
from ddptrain.run.weights_file import StoredWeights, manifest_at, tensors_of, weights_at
from ddptrain.text import first_few

log = logging.getLogger("ddptrain")

Weights = Mapping[str, Any]
"""Tensors, and the extra state of modules (``get_extra_state``)."""
_PREFIX = re.compile(r"^(module|_orig_mod|model)\.")
"""Of DataParallel and DDP, of torch.compile, and of Lightning and others."""
_MOST_WRAPPERS = 3
_HALF_IN_TORCHVISION = ("googlenet", "inception_v3")
"""Whose weights take pictures in -1..1; torchvision's ``transform_input=True`` makes them of ImageNet's."""
_LEAST_SHARE = 0.5
"""Of the model's numbers that have to be found; with fewer it is probably another model's file."""


def load_initial_weights(
    source: str, skip: Sequence[str], node: Mapping[str, Any], model: nn.Module, world: World
) -> Mapping[str, Any] | None:
    """Put what ``init.weights`` names, the source, into a new model, but for names that match a pattern of
    ``skip``, and log what fitted. Returns the manifest of the checkpoint that it was read from; None where it
    is another program's. node: the model's in the config. Collectives: it is downloaded once a node, and all
    ranks learn of one that can't read it.

    Raises UserError where there is no such file, or it is another model's.
    """
    stored = on_all_ranks(world, lambda: read_weights(source, node, world))
    matched = match(model, stored.tensors, source, skip)
    own = model.state_dict()
    # a rank that holds the shapes alone gets the first one's numbers later
    loaded = {
        name: value.to(own[name].device) if isinstance(value, Tensor) else value
        for name, value in matched.loaded.items()
    }
    model.load_state_dict({**own, **loaded})
    for line in matched.lines():
        log.info("weights    %s", line)
    return stored.manifest


@dataclass(frozen=True, slots=True)
class Matched:
    """Which of a model's weights a file has."""

    source: str
    loaded: dict[str, Any]
    share: float
    """Of the model's numbers, in [0, 1]."""
    other_size: list[str]
    cast: list[str]
    """Loaded from another precision."""
    missing: list[str]
    skipped: list[str]
    unused: list[str]
    """Names in the file alone."""

    def lines(self) -> list[str]:
        """For the log."""
        parts = {
            "left out, of another size, so random": self.other_size,
            "of another precision, cast": self.cast,
            "left out by init.skip": self.skipped,
            "not there, so random": self.missing,
            "there, but not in this model": self.unused,
        }
        details = [f"{len(names)} {what}: {first_few(names, 4)}" for what, names in parts.items() if names]
        share = f"{min(self.share, 0.999):.1%}" if self.share < 1 else "100%"
        return [f"{self.source}: {len(tensors_of(self.loaded))} tensors, {share} of the model", *details]


def match(model: nn.Module, weights: Weights, source: str, skip: Sequence[str]) -> Matched:
    """Compare a file's weights with a model's. skip: patterns of names that are left as they are.

    Raises UserError where little or nothing fits.
    """
    key, own = f"init.weights={source}", tensors_of(model.state_dict())
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in own):
            raise UserError(f"init.skip={pattern}: matches no name; there are {first_few(list(own), 4)}.")
    named = model.state_dict(keep_vars=True)
    skipped_values = {
        id(value) for name, value in named.items() if any(fnmatchcase(name, pattern) for pattern in skip)
    }
    skipped = [name for name in own if id(named[name]) in skipped_values]  # under each of its names
    wanted = {name: value for name, value in own.items() if name not in skipped}
    weights = _named_alike(weights, own)
    extra = {
        name: weights[name]
        for name in model.state_dict()
        if name in weights and name not in own and not any(fnmatchcase(name, pattern) for pattern in skip)
    }
    weights = tensors_of(weights)
    same = {
        name: weights[name]
        for name in wanted
        if name in weights and weights[name].shape == wanted[name].shape
    }
    other_size = [
        f"{name} {tuple(weights[name].shape)} there, {tuple(wanted[name].shape)} here"
        for name in wanted
        if name in weights and name not in same
    ]
    if unlike := [f"{name} {why}" for name in same if (why := _unlike(same[name], wanted[name]))]:
        raise UserError(
            f"{key}: {first_few(unlike, 3)}. Save the model's state_dict() as it was before, or name"
            " what is to stay random: init.skip=[pattern]."
        )
    cast = [
        f"{name} {_named(weights[name])} there, {_named(wanted[name])} here"
        for name in same
        if weights[name].dtype != wanted[name].dtype
    ]
    sizes = {name: value.numel() for name, value in wanted.items()}
    share = sum(sizes[name] for name in same) / max(1, sum(sizes.values()))
    if share < _LEAST_SHARE:
        differ = other_size or [
            f"{name} there, {mine} here" for name, mine in zip(weights, wanted, strict=False)
        ]
        raise UserError(
            f"{key}: fits only {share:.1%} of the model, so it is probably another model's:"
            f" {first_few(differ, 3)}. This model is {type(model).__name__}; choose the one that the"
            " weights were trained as (model.name=...), or name what is to stay random: init.skip=[pattern]."
        )
    missing = [name for name in wanted if name not in weights]
    unused = [name for name in weights if name not in own]
    return Matched(key, {**same, **extra}, share, other_size, cast, missing, skipped, unused)


def read_weights(source: str, model: Mapping[str, Any], world: World) -> StoredWeights:
    """Those of a source. model: the config's node, which says whose weights a library has."""
    library = _library_of(model)
    if source == "default":
        defaults = {"torchvision": "DEFAULT", "timm": "default", "transformers": model.get("name")}
        source = f"{library}:{defaults[library]}"
    kind, separator, name = source.partition(":")
    if kind in ("timm", "torchvision", "transformers") and separator and kind != library:
        raise UserError(
            f"init.weights={source}: the model is of {library}. init.weights=default takes that one's own."
        )
    if separator and kind in _LIBRARIES:
        return StoredWeights(_LIBRARIES[kind](name, model, world))
    if is_mirror(source):
        path = once_a_node(world, lambda: local_copy(source, "init.weights"))
    else:
        path = Path(source)
    if not path.exists():
        raise UserError(
            f"init.weights={source}: does not exist. Name a run's folder, a checkpoint's, a .pt, .pth or"
            " .safetensors file, default (the library's own), torchvision:<name>, timm:<tag> or hub:<name>;"
            " or null for random weights."
        )
    return weights_at(path, f"init.weights={source}")


def normalisation_of(source: str, model: Mapping[str, Any]) -> tuple[list[float], list[float]] | None:
    """Mean and deviation of the channels, in 0..255, that the weights of a library or of a run's folder were
    trained with. None where they are not known: of files, mirrors and the hub."""
    library, name = _library_of(model), str(model.get("name"))
    kind, _, tag = source.partition(":")
    if source not in ("", "default") and Path(source).is_dir():
        recall = manifest_at(Path(source)).get("recall") or {}
        return (recall["mean"], recall["std"]) if "std" in recall else None
    if source != "default" and kind != library:
        return None
    try:
        if library == "timm":
            timm = _imported("timm", f"init.weights={source}")
            used = timm.get_pretrained_cfg(f"{name}.{tag}" if tag not in ("", "default") else name)
        elif name in _HALF_IN_TORCHVISION and not model.get("transform_input"):
            return [127.5] * 3, [127.5] * 3
        else:
            from torchvision.models import get_model_weights

            used = get_model_weights(name)[tag or "DEFAULT"].transforms()
    except (ValueError, KeyError, RuntimeError):  # no such model or weights, which `read_weights` says
        return None
    if getattr(used, "mean", None) is None:  # no weights, or a detector's, which normalises by itself
        return None
    # as the data sets have ImageNet's, to a tenth of a level
    mean, std = ([round(255 * value, 1) for value in of] for of in (used.mean, used.std))
    return mean, std


def _unlike(theirs: Tensor, own: Tensor) -> str | None:
    """Why a tensor of the right shape would not give the model's the values that were meant; None where it
    does, but for rounding."""
    if theirs.is_meta:
        return "has no values (device meta)"
    if theirs.layout != torch.strided:
        return f"is sparse ({str(theirs.layout).removeprefix('torch.')}); to_dense() makes it dense"
    if theirs.is_quantized:
        return f"is quantized ({_named(theirs)}); dequantize() makes it {_named(own)}"
    if _kind(theirs) != _kind(own):
        return f"is {_named(theirs)}, and the model's is {_named(own)}"
    if _kind(own) == "whole" and not torch.equal(theirs.to(own.dtype).to(theirs.dtype), theirs):
        return f"has values that {_named(own)} can't hold"
    return None


def _kind(tensor: Tensor) -> str:
    """What a cast keeps. One byte is too little for a weight without a scale, which lies elsewhere."""
    if tensor.is_floating_point():
        return "floating" if tensor.itemsize > 1 else _named(tensor)
    return "complex" if tensor.is_complex() else "whole"


def _named(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _named_alike(weights: Weights, own: Weights) -> Weights:
    """The names as the model has them: without what wrappers have put before them, and with what this model
    puts before those of the one that it wraps."""
    candidates = [weights]
    for _ in range(_MOST_WRAPPERS):
        bare = {_PREFIX.sub("", name): value for name, value in candidates[-1].items()}
        if len(bare) < len(weights):  # two names would be one
            break
        candidates.append(bare)
    outermost = {name.partition(".")[0] for name in own}
    if len(outermost) == 1:
        [wrapper] = outermost
        candidates += [{f"{wrapper}.{name}": value for name, value in of.items()} for of in candidates]
    return max(candidates, key=lambda names: len(names.keys() & own.keys()))


def _library_of(model: Mapping[str, Any]) -> str:
    """Whose model a config's node names, if it is any library's."""
    target = str(model.get("_target_"))
    return next((library for library in ("timm", "transformers") if library in target), "torchvision")


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


def _transformers(name: str, model: Mapping[str, Any], world: World) -> Weights:
    key = f"init.weights=transformers:{name}"
    transformers = _imported("transformers", key)

    def fetched() -> Weights:
        # as transformers names them: its files may have older names
        state: Weights = transformers.AutoModelForObjectDetection.from_pretrained(name).state_dict()
        return state

    return _downloaded(fetched, key, "the model's folder of the hub anywhere, and name that", world)


def _hub(name: str, model: Mapping[str, Any], world: World) -> Weights:
    key = f"init.weights=hub:{name}"
    hub = _imported("huggingface_hub", key)

    def fetched() -> Weights:
        return weights_at(Path(hub.hf_hub_download(name, "model.safetensors")), key).tensors

    return _downloaded(fetched, key, f"model.safetensors of {name} anywhere, and name that", world)


def _imported(package: str, key: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        extra = "transformers" if package == "transformers" else "timm"
        raise UserError(f"{key}: needs {package}: pip install 'ddptrain[{extra}]'") from error


def _downloaded(fetched: Callable[[], Weights], key: str, by_hand: str, world: World) -> Weights:
    """What a library fetches into its cache: by one rank of a node, and then read by all."""

    def attempt() -> Weights:
        try:
            return fetched()
        except UserError:
            raise
        except (ImportError, OSError, RuntimeError, ValueError, UnpicklingError) as error:
            # what the library needs; not there; other bytes
            raise UserError(
                f"{key}: can't be had ({reason(error)}). Without a network, put {by_hand}."
                " Or start from random weights: init.weights=null."
            ) from error

    def fill_cache() -> None:
        attempt()

    once_a_node(world, fill_cache)
    return attempt()


_LIBRARIES: dict[str, Callable[[str, Mapping[str, Any], World], Weights]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers": _transformers,
    "hub": _hub,
}
