"""The verb ``export``: a checkpoint as a file that runs without ddptrain, checked before it is done."""

import inspect
import json
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ddptrain.api.recipe import Deployed, Task
from ddptrain.config.instantiate import typed_arguments
from ddptrain.config.schema import Config
from ddptrain.distributed.world import world_from_environment
from ddptrain.errors import UserError
from ddptrain.run.setup import joined_world, make_task, named_checkpoint, trained_model

log = logging.getLogger("ddptrain")

_TOLERANCE = 1e-3
"""Largest difference from eager, as `Deployed.difference` counts it."""
_PROPERTY = "ddptrain"
"""Of an ONNX file: holds the metadata."""
_OWN_WORDS = ("format", "out")

Runner = Callable[[tuple[Tensor, ...]], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class _Own:
    """The words of the verb itself."""

    format: Literal["onnx", "pt2"]
    out: str = ""


def run(config: Config, folder: Path, checkpoint: str, asked: Mapping[str, str]) -> None:
    """Write a checkpoint of the run in ``folder`` as ``format``: pt2 (torch.export) or onnx, to ``out``.

    The other words are for the task's own `deploy`. In float32, on the CPU.
    """
    if not world_from_environment().is_first:
        return
    own, words = ({n: w for n, w in asked.items() if (n in _OWN_WORDS) == mine} for mine in (True, False))
    chosen = _Own(**typed_arguments(_Own, own, "export"))
    config.device, config.channels_last = "cpu", False
    task, data = make_task(config)
    if type(task).deploy is Task.deploy:
        name = type(task).__name__
        raise UserError(f"export: {name} has none. In Python ddptrain.load(run).module is the model.")
    arguments = typed_arguments(task.deploy, words, "export")
    write = {"pt2": _write_pt2, "onnx": _write_onnx}[chosen.format]
    name = f"model.{chosen.format}"
    target = Path(chosen.out) if chosen.out else folder / name
    if target.is_dir():
        raise UserError(f"out={target}: is a folder; name a file in it: out={target / name}")
    unchecked = target.with_stem(f"{target.stem}.unchecked")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unchecked.touch()
    except OSError as error:
        raise UserError(f"out={target}: can't be written ({error.strerror}). Name another file.") from error
    try:
        with joined_world(config, alone=True) as (world, _, _):
            saved = named_checkpoint(folder, checkpoint)
            model = trained_model(config, task, data, world, saved).eval()
            deployed = task.deploy(model, **arguments)
            if deployed.metadata and target == target.with_suffix(".json"):
                raise UserError(f"out={target}: is where the metadata goes. Name another file: out={name}")
            with torch.no_grad(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", category=FutureWarning)  # of libraries among each other
                difference = _checked(deployed, write(deployed, unchecked), unchecked)
        unchecked.replace(target)
        if deployed.metadata:
            about = json.dumps(deployed.metadata, indent=2, ensure_ascii=False) + "\n"
            target.with_suffix(".json").write_text(about, encoding="utf-8")
    finally:
        unchecked.unlink(missing_ok=True)
    log.info("exported   %s to %s (%.1f MiB)", saved.path, target, target.stat().st_size / 2**20)
    for name, value in zip(deployed.input_names, deployed.inputs, strict=True):
        sizes = ["any" if deployed.any_batch else str(len(value)), *map(str, value.shape[1:])]
        log.info("input      %s, float32 (%s)", name, ", ".join(sizes))
    if difference is None:
        log.warning(
            "UNCHECKED  on both examples eager and the file find nothing, so there was nothing to compare."
            " To have it checked, export with a lower threshold; this one was %s",
            " ".join(f"{name}={value}" for name, value in {**_defaults(task), **arguments}.items()),
        )
    else:
        log.info("checked    against eager on several examples: largest relative difference %.1e", difference)


def _defaults(task: Task) -> dict[str, Any]:
    """The words that the task takes, with their values where the command line has none."""
    parameters = inspect.signature(task.deploy).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def _traced(deployed: Deployed) -> torch.export.ExportedProgram:
    deployed.module(*deployed.inputs)  # what a layer makes in its first pass is there before it is traced
    if not deployed.any_batch:
        return torch.export.export(deployed.module, deployed.inputs)
    free = tuple({0: torch.export.Dim("batch")} for _ in deployed.inputs)
    try:
        return torch.export.export(deployed.module, deployed.inputs, dynamic_shapes=free)
    except torch._dynamo.exc.UserError as error:
        raise UserError(
            f"export: {type(deployed.module).__name__} computes in a way that needs to know how many samples"
            " there are at once. Say how many: batch=1"
        ) from error


def _write_pt2(deployed: Deployed, target: Path) -> Runner:
    torch.export.save(_traced(deployed), target)
    loaded = torch.export.load(target).module()
    return lambda inputs: _as_list(loaded(*inputs))


def _write_onnx(deployed: Deployed, target: Path) -> Runner:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  torch.onnx.export needs it, and says so in a traceback
    except ImportError as error:
        raise UserError(f"export: format=onnx needs {error.name}: pip install 'ddptrain[onnx]'") from error
    torch.onnx.export(
        _traced(deployed),
        f=target,
        input_names=deployed.input_names,
        output_names=deployed.output_names,
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    if deployed.metadata:
        written = onnx.load(target)
        onnx.helper.set_model_props(written, {_PROPERTY: json.dumps(deployed.metadata)})
        onnx.save(written, target)
    session = onnxruntime.InferenceSession(str(target), providers=["CPUExecutionProvider"])

    def run(inputs: tuple[Tensor, ...]) -> list[Tensor]:
        fed = {name: of.numpy() for name, of in zip(deployed.input_names, inputs, strict=True)}
        return [torch.from_numpy(value) for value in session.run(None, fed)]

    return run


def _checked(deployed: Deployed, runner: Runner, target: Path) -> float | None:
    """The largest difference from eager, on the example and on the same turned upside down, and for any
    batch on others; None where there was nothing to compare."""
    largest = None
    examples = [deployed.inputs, tuple(value.flip(-2) for value in deployed.inputs)]
    if deployed.any_batch:
        examples.append(tuple(value[:1] for value in deployed.inputs))
        examples.append(tuple(torch.cat([value, value, value[:1]]) for value in deployed.inputs))
    for inputs in examples:
        expected, given = _as_list(deployed.module(*inputs)), runner(inputs)
        for name, ours, theirs in zip(deployed.output_names, expected, given, strict=True):
            difference = deployed.difference(ours, theirs) if ours.shape == theirs.shape else math.inf
            if difference is None:
                continue
            if not difference <= _TOLERANCE:
                raise RuntimeError(f"{target}: its {name} differs from eager's, by {difference:.1e}")
            largest = max(largest or 0.0, difference)
    return largest


def _as_list(outputs: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else outputs
