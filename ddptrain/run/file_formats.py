"""The files that ``export`` writes, each run by the library that programs run it with."""

import contextlib
import io
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ddptrain.api.recipe import Deployed
from ddptrain.errors import UserError

_PROPERTY = "ddptrain"
"""Under which a file holds the metadata."""
Precision = Literal["fp32", "fp16", "int8"]
Inputs = tuple[Tensor, ...]
Runner = Callable[[Inputs], Sequence[Tensor]]


class Format(NamedTuple):
    """write: called with what is written, the file, the precision and inputs to calibrate int8 with."""

    suffixes: tuple[str, ...]
    """Of its files; the first is of the one that programs name."""
    write: Callable[[Deployed, Path, Precision, Iterable[Inputs]], Runner]
    precisions: tuple[Precision, ...] = ("fp32",)


def as_list(outputs: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else outputs


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


def _pt2(deployed: Deployed, target: Path, precision: Precision, calibration: Iterable[Inputs]) -> Runner:
    torch.export.save(_traced(deployed), target)
    loaded = torch.export.load(target).module()
    return lambda inputs: as_list(loaded(*inputs))


def _onnx(deployed: Deployed, target: Path, precision: Precision, calibration: Iterable[Inputs]) -> Runner:
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

    def run(inputs: Inputs) -> list[Tensor]:
        fed = {name: of.numpy() for name, of in zip(deployed.input_names, inputs, strict=True)}
        return [torch.from_numpy(value) for value in session.run(None, fed)]

    return run


def _openvino(
    deployed: Deployed, target: Path, precision: Precision, calibration: Iterable[Inputs]
) -> Runner:
    """By way of ONNX: OpenVINO reads torch's own programs, but not their suppression of doubles."""
    os.environ.setdefault("NNCF_CI", "1")  # or it sends usage data
    try:
        import nncf
        import openvino
    except ImportError as error:
        raise UserError(
            f"export: format=openvino needs {error.name}: pip install 'ddptrain[openvino]'"
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        _onnx(deployed, Path(folder) / "model.onnx", "fp32", ())
        model = openvino.Core().read_model(Path(folder) / "model.onnx")
        if precision == "int8":
            nncf.set_log_level(logging.ERROR)
            named = nncf.Dataset(
                calibration,
                lambda inputs: {
                    name: of.numpy() for name, of in zip(deployed.input_names, inputs, strict=True)
                },
            )
            with contextlib.redirect_stdout(io.StringIO()):  # its progress bars
                model = nncf.quantize(model, named)
        if deployed.metadata:
            model.set_rt_info(json.dumps(deployed.metadata), [_PROPERTY])
        openvino.save_model(model, target, compress_to_fp16=precision == "fp16")
    # or some processors would compute in half precision
    compiled = openvino.compile_model(target, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(inputs: Inputs) -> list[Tensor]:
        answers = compiled([of.numpy() for of in inputs])
        return [torch.from_numpy(answers[i].copy()) for i in range(len(deployed.output_names))]

    return run


FORMATS = {
    "onnx": Format((".onnx",), _onnx),
    "pt2": Format((".pt2",), _pt2),
    "openvino": Format((".xml", ".bin"), _openvino, ("fp32", "fp16", "int8")),
}
