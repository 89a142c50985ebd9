"""The files that ``export`` writes, each run by the library that programs run it with."""

import contextlib
import io
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ddptrain.api.recipe import Deployed
from ddptrain.errors import UserError

_LAYERS = ("Convolution", "GroupConvolution", "MatMul", "Interpolate", "Parameter", "Constant")
"""OpenVINO's operations before which boxes, scores or logits are made of what comes out."""
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
    libraries: tuple[str, ...] = ()
    """That have to be installed, by the extra of the format's name."""


def check_installed(form: str | None) -> None:
    """Raises UserError where a library is missing that writes or runs this format."""
    libraries = FORMATS[form].libraries if form in FORMATS else ()
    missing = [library for library in libraries if find_spec(library) is None]
    if missing:
        raise UserError(f"export: format={form} needs {missing[0]}: pip install 'ddptrain[{form}]'")


def as_list(outputs: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else outputs


def _traced(deployed: Deployed) -> torch.export.ExportedProgram:
    deployed.module(*deployed.inputs)  # what a layer makes in its first pass is there before it is traced
    free = tuple({0: torch.export.Dim("batch")} for _ in deployed.inputs) if deployed.any_batch else None
    with _refused_by_torch(deployed):
        try:
            return torch.export.export(deployed.module, deployed.inputs, dynamic_shapes=free)
        except torch._dynamo.exc.UserError as error:
            if not deployed.any_batch:
                raise
            raise UserError(
                f"export: {type(deployed.module).__name__} computes in a way that needs to know how many"
                " samples there are at once. Say how many: batch=1"
            ) from error


@contextmanager
def _refused_by_torch(deployed: Deployed) -> Iterator[None]:
    """Raises UserError for whatever torch raises of a model that it can't bring into a file."""
    try:
        yield
    except (UserError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # each of torch's floors has errors of its own
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(
            f"export: torch can't trace {type(deployed.module).__name__}: {first} Does its forward decide by"
            " the values of tensors (if, float(), .item())? In Python the model is"
            " ddptrain.load(<run>).module."
        ) from error


def _pt2(deployed: Deployed, target: Path, precision: Precision, calibration: Iterable[Inputs]) -> Runner:
    torch.export.save(_traced(deployed), target)
    loaded = torch.export.load(target).module()
    return lambda inputs: as_list(loaded(*inputs))


def _onnx(deployed: Deployed, target: Path, precision: Precision, calibration: Iterable[Inputs]) -> Runner:
    import onnx
    import onnxruntime

    _write_onnx(deployed, target)
    if deployed.metadata:
        written = onnx.load(target)
        onnx.helper.set_model_props(written, {_PROPERTY: json.dumps(deployed.metadata)})
        onnx.save(written, target)
    session = onnxruntime.InferenceSession(str(target), providers=["CPUExecutionProvider"])
    return lambda inputs: [torch.from_numpy(value) for value in session.run(None, _named(deployed, inputs))]


def _openvino(
    deployed: Deployed, target: Path, precision: Precision, calibration: Iterable[Inputs]
) -> Runner:
    """By way of ONNX: OpenVINO reads torch's own programs, but not their suppression of doubles."""
    os.environ.setdefault("NNCF_CI", "1")  # or it sends usage data
    import openvino
    from openvino._offline_transformations import apply_moc_transformations

    with tempfile.TemporaryDirectory() as folder:
        _write_onnx(deployed, Path(folder) / "model.onnx")
        model = openvino.Core().read_model(Path(folder) / "model.onnx")
        # fuses x * sigmoid(x) and folds constants: quantised piece by piece they cost more than int8 saves.
        # As openvino.convert_model does, which sends usage data
        apply_moc_transformations(model, cf=True)
        if precision == "int8":
            import nncf

            nncf.set_log_level(logging.ERROR)
            examples = nncf.Dataset(calibration, partial(_named, deployed))
            with contextlib.redirect_stdout(io.StringIO()):  # its progress bars
                # MIXED: SiLU and its kind are hardly negative, so a symmetric range would waste half of it
                model = nncf.quantize(
                    model,
                    examples,
                    preset=nncf.QuantizationPreset.MIXED,
                    # boxes in pixels would have one of 256 places
                    ignored_scope=nncf.IgnoredScope(names=_after_the_layers(model), validate=False),
                )
        if deployed.metadata:
            model.set_rt_info(json.dumps(deployed.metadata), [_PROPERTY])
        openvino.save_model(model, target, compress_to_fp16=precision == "fp16")
    # or some processors would compute in half precision
    compiled = openvino.compile_model(target, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(inputs: Inputs) -> list[Tensor]:
        answers = compiled(_named(deployed, inputs))
        return [torch.from_numpy(answers[i].copy()) for i in range(len(deployed.output_names))]

    return run


def _write_onnx(deployed: Deployed, target: Path) -> None:
    program = _traced(deployed)
    with _refused_by_torch(deployed):
        torch.onnx.export(
            program,
            f=target,
            input_names=deployed.input_names,
            output_names=deployed.output_names,
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def _after_the_layers(model: Any) -> list[str]:
    """Names of an OpenVINO model's operations between its last layers and its outputs, which are cheap."""
    names: set[str] = set()
    left = [result.input_value(0).get_node() for result in model.get_results()]
    while left:
        node = left.pop()
        if node.get_friendly_name() not in names and node.get_type_name() not in _LAYERS:
            names.add(node.get_friendly_name())
            left += [value.get_node() for value in node.input_values()]
    return sorted(names)


def _named(deployed: Deployed, inputs: Inputs) -> dict[str, Any]:
    """NumPy's arrays, by the names of the file's inputs."""
    return {name: of.numpy() for name, of in zip(deployed.input_names, inputs, strict=True)}


FORMATS = {
    "onnx": Format((".onnx",), _onnx, libraries=("onnx", "onnxscript", "onnxruntime")),
    "pt2": Format((".pt2",), _pt2),
    "openvino": Format(
        (".xml", ".bin"), _openvino, ("fp32", "fp16", "int8"), ("openvino", "nncf", "onnx", "onnxscript")
    ),
}
