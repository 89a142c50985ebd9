"""Weights in a file or folder that anybody may have written: ``torch.save``'s, safetensors', a run's, a
checkpoint's. No code of theirs is executed."""

import re
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddptrain.engine.saved_checkpoint import MANIFEST, newest_in, read, steps_in, unpack
from ddptrain.errors import UserError, reason
from ddptrain.text import first_few, json_object

_INSIDE = ("state_dict", "model_state_dict", "model_ema", "model", "weights", "params")
"""Where other programs' checkpoints keep the weights."""
_EXTRA_STATE = "_extra_state"
"""What torch appends to a module's name, for its state that is no tensor."""
_DEEPEST = 3
"""A pickle may hold itself."""
_ENDINGS = (".pt", ".pth", ".safetensors")
_OTHER_CODE = re.compile(r"GLOBAL (\S+) was not an allowed")
"""torch's message names what a pickle asks for."""


class StoredWeights(NamedTuple):
    """tensors: on the CPU, by name, with the extra state of modules (``get_extra_state``). manifest: of a
    checkpoint; None of another program's file."""

    tensors: Mapping[str, Any]
    manifest: Mapping[str, Any] | None = None


def weights_at(path: Path, key: str) -> StoredWeights:
    """What is stored at a path. key: ``init.weights=...``, for messages.

    Raises UserError where there are none, or they can't be read.
    """
    try:
        if path.is_dir():
            return _of_folder(path, key)
        if not path.is_file():
            raise UserError(f"{key}: is neither a file nor a folder.")
        return StoredWeights(_of_file(path, key))
    except OSError as error:
        raise UserError(f"{key}: can't be read ({reason(error)}).") from error


def manifest_at(path: Path) -> Mapping[str, Any]:
    """Of the checkpoint that `weights_at` reads there; empty of another program's file."""
    checkpoints = path / "checkpoints"
    places = [checkpoints / "best", *reversed(steps_in(checkpoints)), path]
    return next(filter(None, (json_object(place / MANIFEST) for place in places)), {})


def _of_folder(path: Path, key: str) -> StoredWeights:
    """Of a checkpoint, or of a run's best, or else newest; the averaged ones where there are some."""
    if (path / "checkpoints").is_dir():
        best = path / "checkpoints" / "best"
        saved = read(best) if best.is_dir() else newest_in(path / "checkpoints")
        if saved is None:
            raise UserError(f"{key}: holds no checkpoint yet.")
    elif (path / MANIFEST).exists():
        saved = read(path)
    else:
        raise UserError(f"{key}: is neither a run's folder nor a checkpoint's.{_sources_in(path)}")
    return StoredWeights(_inside(unpack(saved), key), saved.manifest)


def _sources_in(path: Path) -> str:
    """What a folder holds that could have been meant, the newest first."""
    runs = [folder.parent for depth in ("*", "*/*") for folder in path.glob(f"{depth}/checkpoints")]
    steps = [manifest.parent for manifest in path.glob(f"*/{MANIFEST}")]
    files = [file for file in path.iterdir() if file.suffix in _ENDINGS]
    sources = sorted([*runs, *steps, *files], key=lambda one: one.stat().st_mtime, reverse=True)
    return f" Name one that it holds: {first_few([str(one) for one in sources], 3)}." if sources else ""


def _of_file(path: Path, key: str) -> dict[str, Any]:
    with path.open("rb") as file:
        begins = file.read(40)
    if not begins:
        raise UserError(f"{key}: is empty (0 bytes). Copy or download it again.")
    if all(byte in b"\t\r\n" or 32 <= byte < 127 for byte in begins):  # no format of weights begins so
        raise UserError(
            f"{key}: is a text, and holds no weights; it begins with {begins.decode()!r}. Download the file"
            " itself (a pointer of git lfs or a page of errors is not it)."
        )
    if path.suffix == ".safetensors":
        return _safetensors(path, key)
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # torch raises whatever the bytes lead to
        if isinstance(error, UnpicklingError) and (code := _OTHER_CODE.search(str(error))):
            raise UserError(
                f"{key}: holds more than tensors: {code[1]}, which could run any code. Save the model's"
                " state_dict() instead."
            ) from error
        why = "" if isinstance(error, UnpicklingError) else f" ({reason(error)})"
        raise UserError(
            f"{key}: can't be read as weights{why}: it is damaged, or torch.save has not written it. Copy or"
            " download it again, or save the model's state_dict() with torch.save."
        ) from error
    return _inside(loaded, key)


def _safetensors(path: Path, key: str) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise UserError(f"{key}: needs safetensors: pip install 'ddptrain[safetensors]'") from error
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(
            f"{key}: can't be read as weights ({reason(error)}). Copy or download it again."
        ) from error


def _inside(content: Any, key: str) -> dict[str, Any]:
    """The weights in what a file holds, as they are or under one of the usual names."""
    if weights := _weights_in(content, _DEEPEST):
        return weights
    names = [str(name) for name in content] if isinstance(content, Mapping) else []
    holds = f"it holds {first_few(names, 4)}" if names else f"it holds a {type(content).__name__}"
    raise UserError(
        f"{key}: holds no weights, as they are or under {', '.join(_INSIDE)}; {holds}. Save the model's"
        " state_dict()."
    )


def _weights_in(content: Any, depth: int) -> dict[str, Any]:
    """Empty where there are none. What lies under a usual name goes before tensors beside it: those are of a
    program's own, such as its best accuracy."""
    if not isinstance(content, Mapping) or depth == 0:
        return {}
    average = content.get("average")
    if isinstance(average, Mapping) and average.get("weights"):
        return _state_of(average["weights"])
    for name in _INSIDE:
        if weights := _weights_in(content.get(name), depth - 1):
            return weights
    return _state_of(content) if tensors_of(content) else {}


def _state_of(content: Mapping[Any, Any]) -> dict[str, Any]:
    """Its tensors, and what modules keep beside them (``get_extra_state``)."""
    extra = {n: v for n, v in content.items() if isinstance(n, str) and n.endswith(_EXTRA_STATE)}
    return {**tensors_of(content), **extra}


def tensors_of(content: Mapping[Any, Any]) -> dict[str, Tensor]:
    """What of it is a tensor with a name."""
    return {
        name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)
    }
