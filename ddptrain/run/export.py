"""The verb ``export``: a checkpoint as a file that runs without ddptrain, checked before it is done."""

import inspect
import json
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ddptrain.api.recipe import Deployed, Task
from ddptrain.config.instantiate import typed_arguments
from ddptrain.config.schema import Config
from ddptrain.distributed.world import world_from_environment
from ddptrain.errors import UserError
from ddptrain.run.file_formats import FORMATS, Inputs, Precision, Runner, as_list, check_installed
from ddptrain.run.judged_file import Answers, CalibrationInputs, judge
from ddptrain.run.setup import joined_world, make_task, named_checkpoint, trained_model

log = logging.getLogger("ddptrain")

_TOLERANCE = 1e-3
"""Largest difference from eager, as `Deployed.difference` counts it."""
_ROUNDING = 1e-6
"""Relative: about 8 times that of float32."""
_SLACK = 10.0
"""A file's own rounding moves it by another amount; by so many times at most."""
_POINT = 0.01
"""A metric that is worse by more is worth a warning."""


@dataclass(frozen=True, slots=True)
class _Settings:
    """Of the verb itself; the others are the task's."""

    format: Literal["onnx", "pt2", "openvino"]
    out: str = ""
    precision: Precision = "fp32"
    validate: bool | None = None
    """None: where the precision is not fp32."""

    def __post_init__(self) -> None:
        if self.validate is False and self.precision != "fp32":
            raise UserError(
                f"validate=false: a file in precision={self.precision} can be judged by its metrics only."
                " Leave it out."
            )


def run(config: Config, folder: Path, checkpoint: str, settings: Mapping[str, str]) -> None:
    """Write a checkpoint of the run in ``folder`` as ``format``: pt2 (torch.export), onnx or openvino, to
    ``out``.

    The other settings are for the task's own `deploy`. On the CPU. With ``validate``, and always in another
    precision than fp32, the file's metrics are compared with the model's on the validation set.
    """
    if not world_from_environment().is_first:
        return
    names = [field.name for field in fields(_Settings)]
    own = {name: value for name, value in settings.items() if name in names}
    of_task = {name: value for name, value in settings.items() if name not in names}
    check_installed(own.get("format"))
    config.device, config.channels_last = "cpu", False
    task, data = make_task(config)
    if type(task).deploy is Task.deploy:
        name = type(task).__name__
        raise UserError(f"export: {name} has none. In Python ddptrain.load(run).module is the model.")
    arguments = typed_arguments(task.deploy, of_task, "export", names)
    chosen = _Settings(**typed_arguments(_Settings, own, "export"))
    target = _target(chosen, folder)
    needs_set = chosen.validate or chosen.precision != "fp32"
    suffixes = FORMATS[chosen.format].suffixes
    if chosen.out:
        _check_absent(target, [*_files(target, suffixes), _about(target), *[_picture(target)] * needs_set])
    with (
        _named_once_checked(target, suffixes) as unchecked,
        joined_world(config, single=True) as (world, _, _),
    ):
        saved = named_checkpoint(folder, checkpoint)
        model = trained_model(config, task, data, world, saved, needs_data=needs_set).eval()
        deployed = task.deploy(model, **arguments)
        if needs_set and deployed.validation is None:
            raise UserError(
                f"export: {type(task).__name__} offers no comparison on the validation set. Use"
                " precision=fp32, and validate=false."
            )
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)  # of libraries among each other
            int8 = chosen.precision == "int8"
            examples = CalibrationInputs(data, deployed, config.seed) if int8 else ()
            runner = FORMATS[chosen.format].write(deployed, unchecked, chosen.precision, examples)
            used = {**_defaults(task), **arguments}
            described = " ".join(f"{name}={value}" for name, value in used.items() if value is not None)
            if chosen.precision == "fp32":
                _check(deployed, runner, described)
            if needs_set:
                answers = judge(task, data, deployed, runner, _picture(unchecked))
                _log_judged(described, task, *answers)
    if deployed.metadata:
        about = json.dumps(deployed.metadata, indent=2, ensure_ascii=False) + "\n"
        _about(target).write_text(about, encoding="utf-8")
    mib = sum(file.stat().st_size for file in _files(target, suffixes)) / 2**20
    log.info("exported   %s to %s (%.1f MiB)", saved.path, target, mib)
    for name, value in zip(deployed.input_names, deployed.inputs, strict=True):
        sizes = ["any" if deployed.any_batch else str(len(value)), *map(str, value.shape[1:])]
        kind = str(value.dtype).removeprefix("torch.")
        log.info("input      %s, %s (%s)", name, kind, ", ".join(sizes))


def _files(target: Path, suffixes: Sequence[str]) -> list[Path]:
    """Of the format."""
    return [target.with_suffix(suffix) for suffix in suffixes]


def _about(target: Path) -> Path:
    """The JSON that describes a file: of another format's beside it, it is another one."""
    return target.with_name(f"{target.name}.json")


def _picture(target: Path) -> Path:
    """Of the file's answers and the model's."""
    return target.with_name(f"{target.name}.png")


def _check_absent(target: Path, written: Sequence[Path]) -> None:
    """Raise UserError for a file that is there."""
    for path in written:
        if os.path.lexists(path):
            which = "" if path == target else f"{path}, which is written beside it, "
            raise UserError(f"out={target}: {which}exists already, and nothing is overwritten. Name another.")


@contextmanager
def _named_once_checked(target: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    """Another name to write a file under. Where the block ends well, the format's files get their own, with
    the picture if there is one; else they are deleted."""
    unchecked = target.with_stem(f"{target.stem}.unchecked")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unchecked.touch()
    except OSError as error:
        raise UserError(f"out={target}: can't be written ({error.strerror}). Name another file.") from error
    written = [*_files(unchecked, suffixes), _picture(unchecked)]
    try:
        yield unchecked
        for aside, path in zip(written, [*_files(target, suffixes), _picture(target)], strict=True):
            if aside.exists():
                aside.replace(path)
            else:  # not every export draws a picture, and that of an earlier one shows another file
                path.unlink(missing_ok=True)
    finally:
        for aside in written:
            aside.unlink(missing_ok=True)


def _target(chosen: _Settings, folder: Path) -> Path:
    form = FORMATS[chosen.format]
    if chosen.precision not in form.precisions:
        raise UserError(f"precision={chosen.precision}: format={chosen.format} is written in fp32 only.")
    name = f"model{form.suffixes[0]}"
    target = Path(chosen.out) if chosen.out else folder / name
    if target.is_dir():
        raise UserError(f"out={target}: is a folder; name a file in it: out={target / name}")
    if target.suffix != form.suffixes[0]:
        raise UserError(f"out={target}: must end in {form.suffixes[0]} for format={chosen.format}.")
    return target


def _log_judged(described: str, task: Task, model: Answers, file: Answers) -> None:
    """Of the metrics that the terminal shows. described: what the file was made with: thresholds count."""
    names = [name for name in model.metrics if "/" not in name]
    metrics = "  ".join(f"{name} {file.metrics[name]:.4f} ({model.metrics[name]:.4f})" for name in names)
    log.info("validated  the file's metrics (and the model's), with %s: %s", described, metrics)
    log.info("speed      %.2f ms a sample, the model %.2f, on this CPU", file.ms, model.ms)
    of_model, of_file = (answers.metrics[task.best_metric] for answers in (model, file))
    if not of_model:
        log.warning(
            "UNCHECKED  the model's %s is 0 with %s: nothing was compared", task.best_metric, described
        )
    if not (of_model - of_file) * (1 if task.higher_is_better else -1) <= _POINT:  # also where it is NaN
        log.warning("WORSE      by %.4f in %s than the model", abs(of_model - of_file), task.best_metric)


def _defaults(task: Task) -> dict[str, Any]:
    """The settings that the task takes, with their values where the command line has none."""
    parameters = inspect.signature(task.deploy).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def _check(deployed: Deployed, runner: Runner, described: str) -> None:
    """Compare the file with the model. Raises UserError where they differ by more than rounding explains."""
    differences = _differences(deployed, runner)
    if not differences:
        log.warning(
            "UNCHECKED  on both examples eager and the file find nothing that rounding does not decide, so"
            " there was nothing to compare. To have it checked, export with a lower score=... or a"
            " higher most=...; this one was %s",
            described,
        )
        return
    if all(difference <= _TOLERANCE for difference in differences.values()):
        largest = max(differences.values())
        log.info("checked    against eager on several examples: largest relative difference %.1e", largest)
        return
    by_rounding = dict.fromkeys(differences, 0.0)
    for seed in range(3):
        for name, difference in _differences(deployed, _rounded(deployed.module, seed)).items():
            by_rounding[name] = max(by_rounding.get(name, 0.0), difference)
    for name, difference in differences.items():
        explained = by_rounding[name] > _TOLERANCE and difference <= _SLACK * by_rounding[name]
        if not (difference <= _TOLERANCE or explained):
            raise UserError(
                f"export: the file's {name} are {difference:.1e} from the model's, where {_TOLERANCE:g} is"
                f" allowed, so it was not kept. It was made with {described or 'no words'}."
            )
        if difference > _TOLERANCE:
            log.warning(
                "UNCHECKED  the file's %s are %.1e from the model's. Changes of %g inside the model move its"
                " own by %.1e, so rounding may explain it; with validate=true the metrics are compared",
                name, difference, _ROUNDING, by_rounding[name],
            )  # fmt: skip


def _differences(deployed: Deployed, runner: Runner) -> dict[str, float]:
    """Each output's largest from eager, on the example and on the same turned upside down, and for any batch
    on others. NaN where the shape is another one or a number is not finite. Without outputs where there was
    nothing to compare."""
    largest: dict[str, float] = {}
    examples = [deployed.inputs, tuple(v.flip(-2) if v.ndim > 1 else v for v in deployed.inputs)]
    if deployed.any_batch:
        examples.append(tuple(value[:1] for value in deployed.inputs))
        examples.append(tuple(torch.cat([value, value, value[:1]]) for value in deployed.inputs))
    for inputs in examples:
        expected, outputs = as_list(deployed.module(*inputs)), runner(inputs)
        for name, eager, output in zip(deployed.output_names, expected, outputs, strict=True):
            comparable = eager.shape == output.shape and bool(output.isfinite().all())
            difference = deployed.difference(eager, output) if comparable else math.nan
            before = largest.get(name, -1.0)
            if difference is not None and not math.isnan(before) and not difference <= before:
                largest[name] = difference  # also where it is NaN, which stays
    return largest


def _rounded(module: nn.Module, seed: int) -> Runner:
    """The model, where each value that a layer gives differs by about what rounding is."""
    generator = torch.Generator().manual_seed(seed)

    def changed(layer: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        if torch.equal(output, output.round()):  # places or counts
            return output
        return output * (1 + _ROUNDING * torch.randn(output.shape, generator=generator).to(output.dtype))

    layers = [layer for layer in module.modules() if next(layer.children(), None) is None]

    def run(inputs: Inputs) -> Sequence[torch.Tensor]:
        hooks = [layer.register_forward_hook(changed) for layer in layers]
        try:
            return as_list(module(*inputs))
        finally:
            for hook in hooks:
                hook.remove()

    return run
