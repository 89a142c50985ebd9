"""The verb ``checkpoint``: are a run's checkpoints sound, what is in one, and its weights as a plain file.

Needs no data, no device and none of the recipe's code.
"""

import io
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ddptrain.config.instantiate import typed_arguments
from ddptrain.distributed.world import world_from_environment
from ddptrain.engine.saved_checkpoint import STATE, read, steps_in, unpack
from ddptrain.errors import UserError
from ddptrain.observe.console import open_log
from ddptrain.run.setup import named_checkpoint
from ddptrain.run.weights_file import tensors_of
from ddptrain.text import first_few, in_columns, replace_file
from ddptrain.version import __version__

Weights = dict[str, Tensor]


class RunFolder(NamedTuple):
    """The run whose checkpoints are asked for."""

    folder: Path
    recipe: str


def run(action: str, of: RunFolder, settings: Mapping[str, str]) -> None:
    """Do ``verify``, ``show`` or ``convert``.

    settings: the parameters of that function, as typed on the command line. Under torchrun only the first
    rank does it.
    """
    if not world_from_environment().is_first:
        return
    open_log(None, first=True)
    works: dict[str, Callable[..., None]] = {"verify": verify, "show": show, "convert": convert}
    work = works[action]
    work(of, **typed_arguments(work, settings, f"checkpoint {action}"))


def verify(of: RunFolder, checkpoint: str = "") -> None:
    """One line for each checkpoint of the run, or for the one named: is it what was written?

    Raises UserError where one is not.
    """
    folder = of.folder / "checkpoints"
    steps = steps_in(folder)
    every = [*steps, *(folder / name for name in ("best", "best-before") if (folder / name).is_dir())]
    if not every:
        raise UserError(f"run={of.folder}: holds no checkpoint yet.")
    if checkpoint == "last":
        if not steps:
            raise UserError(f"run={of.folder}: holds no checkpoint of a step; it has best.")
        every = steps[-1:]
    elif checkpoint:
        every = [folder / checkpoint if (folder / checkpoint).is_dir() else Path(checkpoint)]
    damaged = 0
    for path in every:
        step, problem = "?", ""
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        try:
            saved = read(path)
            step = unpack(saved)["step"]
        except UserError as error:
            if not path.exists() and not checkpoint:
                continue  # a running job has just dropped it
            problem = str(error).removeprefix(f"{path}: ")
            damaged += 1
        print(f"{path.name:<12}  step {step:<8}  {size:>15,} bytes  {problem or 'ok'}", flush=True)
    if damaged:
        raise UserError(
            f"run={of.folder}: {damaged} of {len(every)} checkpoints can't be used. A run goes on from its"
            " newest that is ok; to go on from another, name it (run.resume=<folder>) and a new run.dir."
        )


def show(of: RunFolder, checkpoint: str = "last") -> None:
    """What a checkpoint holds: its facts, sizes and norms, and a table of its tensors."""
    saved = named_checkpoint(of.folder, checkpoint)
    state = unpack(saved)
    model, averaged = tensors_of(state["model"]), tensors_of(_averaged(state))
    metrics = saved.manifest.get("metrics", {})
    facts = {
        "checkpoint": saved.path,
        "config": of.folder / "config.yaml",
        "recipe": of.recipe,
        **{name: value for name, value in saved.manifest.items() if isinstance(value, int | float | str)},
        "outputs": len(saved.manifest.get("outputs", [])),
        "metrics": "  ".join(f"{name} {value:.6g}" for name, value in metrics.items()),
        "best": f"{state.get('best')} at step {state.get('best_step')}",
        STATE: f"{len(saved.payload):,} bytes, SHA-256 {saved.manifest['files'][STATE]['sha256']}",
        "weights": _size_and_norm(model),
        "averaged": _size_and_norm(averaged) if averaged else "none",
        "optimizer": _optimizer(state),
    }
    rows = [("tensor", "shape", "dtype", "2-norm", "averaged" if averaged else "")]
    for name, tensor in model.items():
        shape, dtype = "x".join(map(str, tensor.shape)) or "-", str(tensor.dtype).removeprefix("torch.")
        rows.append((name, shape, dtype, _norm([tensor]), _norm([averaged[name]]) if averaged else ""))
    lines = [f"{name:<12}  {value}" for name, value in facts.items()]
    print("\n".join([*lines, "", *in_columns(rows)]))


def convert(
    of: RunFolder, out: str, checkpoint: str = "", weights: Literal["averaged", "model"] | None = None
) -> None:
    """Write a checkpoint's weights to the file ``out``, to be loaded without ddptrain.

    ``.pt``: a dict of tensors (``torch.load``); ``.safetensors``. weights: by default those that
    evaluation uses.
    """
    target = Path(out)
    as_bytes = {".pt": _as_pt, ".safetensors": _as_safetensors}.get(target.suffix)
    if as_bytes is None:
        raise UserError(f"out={out}: must end in .pt (a dict of tensors, by torch.save) or .safetensors.")
    if os.path.lexists(target):
        raise UserError(f"out={out}: exists already, and nothing is overwritten. Name another file.")
    saved = named_checkpoint(of.folder, checkpoint)
    state = unpack(saved)
    averaged = _averaged(state)
    if weights == "averaged" and not averaged:
        raise UserError(f"weights=averaged: {saved.path} was saved without (ema.decay). Use weights=model.")
    chosen, kind = (state["model"], "model") if weights == "model" or not averaged else (averaged, "averaged")
    facts = {"step": str(state["step"]), "recipe": of.recipe, "ddptrain": __version__, "weights": kind}
    content = as_bytes(chosen, facts)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, content)
    except OSError as error:
        raise UserError(
            f"out={out}: can't be written ({error.strerror}): {len(content):,} bytes. Make room, or name"
            " another file."
        ) from error
    tensors = tensors_of(chosen)
    print(f"{out}: {len(tensors)} tensors, {len(content):,} bytes: the {kind} weights of {saved.path}")
    if (more := [name for name in chosen if name not in tensors]) and target.suffix == ".safetensors":
        print(f"{out}: without {first_few(more, 3)}, which is no tensor; .pt holds it too")


def _averaged(state: Mapping[str, Any]) -> dict[str, Any]:
    weights: dict[str, Any] = state.get("average", {}).get("weights", {})
    return weights


def _as_pt(weights: Mapping[str, Any], facts: Mapping[str, str]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(weights), buffer)
    return buffer.getvalue()


def _as_safetensors(weights: Mapping[str, Any], facts: Mapping[str, str]) -> bytes:
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise UserError(
            "out=*.safetensors: needs a library: pip install 'ddptrain[safetensors]'. Or write .pt."
        ) from error
    # the format knows neither tensors that share memory (tied weights) nor other layouts (channels_last)
    tensors = tensors_of(weights).items()
    own = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors}
    return save(own, metadata={"format": "pt", **facts})


def _optimizer(state: Mapping[str, Any]) -> str:
    """Its class, how many tensors it trains, and the norm of each thing that it keeps for them."""
    kept: dict[str, list[Tensor]] = {}
    for slots in state["optimizer"].get("state", {}).values():
        for name, value in slots.items():
            if isinstance(value, Tensor) and name != "step":
                kept.setdefault(name, []).append(value)
    trained = sum(len(group["params"]) for group in state["optimizer"].get("param_groups", []))
    norms = "".join(f", {name} 2-norm {_norm(tensors)}" for name, tensors in kept.items())
    return f"{state.get('optimizer_class', '?')}, trains {trained} tensors{norms}"


def _size_and_norm(weights: Weights) -> str:
    # some may be tied
    distinct = {(tensor.data_ptr(), tensor.shape): tensor for tensor in weights.values()}.values()
    floats = [tensor for tensor in distinct if tensor.is_floating_point() or tensor.is_complex()]
    numbers = sum(tensor.numel() for tensor in distinct)
    return f"{numbers:,} numbers in {len(weights)} tensors, buffers included, 2-norm {_norm(floats)}"


def _norm(tensors: Iterable[Tensor]) -> str:
    """The 2-norm of all numbers together."""
    sizes = (tensor.abs() if tensor.is_complex() else tensor for tensor in tensors)
    return f"{math.sqrt(sum(float(size.double().square().sum()) for size in sizes)):.6g}"
