"""``export``: a trained model as a file for other programs."""

from ddptrain.config.arguments import Arguments
from ddptrain.distributed.launcher.spinning import choose_spinning
from ddptrain.errors import ExitCode, UserError
from ddptrain.observe.mirror.layout import is_mirror
from ddptrain.verbs.composing import recorded
from ddptrain.verbs.saved_run import CHECKPOINT_WORDS, read_run_with_settings
from ddptrain.verbs.verb import Verb

HELP = f"""\
python -m ddptrain export run=<folder> [checkpoint=<which>] format=onnx|openvino|pt2 [out=<file>] [own words]

A file that runs without ddptrain, checked against the model on the same batch before it is called done.
A JSON file beside it tells what goes in and comes out. By default both lie in the run's folder, as
model.*, and replace those of the export before; what out= names must not be there yet.

{CHECKPOINT_WORDS}
  precision=<which>     openvino: fp32 (by default), fp16, or int8, calibrated on 300 training samples
  validate=true         the file's metrics beside the model's on the validation set; always so below fp32
  batch=<n>             a model for that many pictures at once; by default any number, of detectors 1
  nms=true              detection: a list of boxes without doubles, most=<n> (100) of score=<s> (0.25) or more

  python -m ddptrain export run=runs/cnn format=onnx out=model.onnx
  python -m ddptrain export run=runs/yolo format=openvino precision=int8 nms=true"""


def export(arguments: Arguments) -> int:
    """Words that are no keys of the config are for the task."""
    config, folder, checkpoint, settings = read_run_with_settings(arguments, own=["precision"])
    named = [word.removeprefix("run=") for word in arguments.overrides if word.startswith("run=")]
    if any(map(is_mirror, named)) and "out" not in settings:
        raise UserError("export: name the file, out=<file>; the run lies in a store.")
    choose_spinning()
    from ddptrain.run import export

    with recorded():
        export.run(config, folder, checkpoint, settings)
    return ExitCode.DONE


VERB = Verb(
    run=export,
    summary="a trained model as ONNX, OpenVINO or torch.export's file",
    help=HELP,
    of_a_run=True,
)
