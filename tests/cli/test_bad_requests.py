"""What can only be known once torch, the data or a run has been looked at: one message that names it, exit
code 2, and nothing left behind."""

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from ddptrain.verbs.main import main

SMALL = "recipe=cnn_digits device=cpu model.width=8 observers=[console,jsonl,plots]"
BRIEF = f"{SMALL} train.steps=1"
PICTURES = (
    f"{BRIEF} data=imagefolder data.root=pictures data.source.size=8 data.augment.crop=0 train.batch_size=18"
)

REFUSED = {
    f"{BRIEF} optim.lr=nan": "optim.lr=nan: must be a finite number",
    f"{BRIEF} optim.lr=-0.1": "learning rate",
    f"{BRIEF} optim.betas=[2,2]": "beta",
    f"{BRIEF} optim.betas=[0.9]": "optim.betas=[0.9]: must be",
    f"{BRIEF} optim.weight_decay=-1": "weight_decay",
    f"{BRIEF} +optim.eps=-1": "epsilon",
    f"{BRIEF} +optim.momentum=0.9": "optim.momentum: torch.optim.AdamW takes no such argument",
    f"{BRIEF} optim=[sgd,adamw]": "takes no such argument",
    f"{BRIEF} ~optim._target_": "optim._target_: needs the dotted name",
    f"{BRIEF} optim._target_=torch.optim.Adamw": "Did you mean",
    f"{BRIEF} optim._target_=torch.nn.Linear": "optim",
    f"{BRIEF} model.width=0": "model",
    f"{BRIEF} model.width=wide": "model.width=wide: must be a whole number",
    f"{BRIEF} model.dropout=2": "dropout",
    f"{BRIEF} model._target_=ddptrain.recipes.cnn.SmallCNN": "Did you mean SmallCnn",
    f"{BRIEF} model=recurrent": "model",
    f"{BRIEF.replace('model.width=8', '')} model=mobilenet_v3_small_32": "MobileNetV3 takes colour images",
    f"{BRIEF} task.label_smoothing=x": "task.label_smoothing=x: must be a finite number",
    f"{BRIEF} task._target_=ddptrain.data.images.digits.Digits": "Digits takes no such argument",
    f"{BRIEF} ~task.label_smoothing task._target_=ddptrain.data.images.digits.Digits": "Digits: must be a",
    f"{BRIEF} data.workers=-1": "data.workers=-1: must be 0 or more, or auto",
    f"{BRIEF} data.workers=few": "data.workers=few: must be a whole number or auto",
    f"{BRIEF} data.resident=yes_please": "data.resident=yes_please: must be true or false or auto",
    f"{BRIEF} data.augment.crop=-1": "data.augment.crop=-1: must be 0 or more",
    f"{BRIEF} data.augment.cutout=1.5": "data.augment.cutout=1.5: must be a whole number",
    f"{BRIEF} data._target_=ddptrain.data.images.digits.Digits": "data",
    f"{BRIEF} ~data.source": "data.source: ddptrain.data.images.data.ImageData needs it",
    f"{BRIEF} +data.source.train=5": "ddptrain.data.images.digits.Digits takes no such argument",
    f"{BRIEF} data=text": "data",
    f"{BRIEF} device=cuda:99": "device=cuda:99: ",
    f"{BRIEF} device=tpu": "device=tpu: ",
    f"{BRIEF} device=CPU": "device=CPU: ",
    f"{BRIEF} device=cpu:x": "device=cpu:x: ",
    f"{BRIEF} strategy=ddp": "strategy=ddp: needs ranks",
    f"{BRIEF} strategy.sync_batchnorm=true": "strategy.sync_batchnorm=true: ",
    f"{BRIEF} run.resume=nowhere": "nowhere: does not exist",
    f"{BRIEF} run.resume=file": "file: is a file",
    f"{BRIEF} run.resume=empty": "empty: is not a checkpoint of ddptrain",
    f"{BRIEF} run.dir=file": "run.dir=file: is a file. Name a folder: run.dir=...",
    f"{BRIEF} run.dir=file/deep": "run.dir=file/deep: can't be written",
    "recipe=cnn_cifar10 device=cpu data.root=nowhere +data.source.url=ftp://x/y": "http:// or https://",
    "recipe=cnn_cifar10 device=cpu data.root=file": "file",
    "recipe=lstm_text device=cpu data=text": "data.source.path",
    "recipe=lstm_text device=cpu data=text data.source.path=nowhere": "nowhere",
    "recipe=lstm_text device=cpu data=text data.source.path=empty": "empty",
    "recipe=yolo_custom device=cpu": "data.source.path",
    "recipe=yolo_custom device=cpu data.source.path=fil": "no such file or folder. Did you mean file?",
    "recipe=yolo_custom device=cpu data.source.path=file": "file",
    PICTURES.replace("pictures", "nowhere"): "data.root=nowhere: there is no such folder",
    PICTURES.replace("pictures", "empty"): "data.root=empty: no image found",
    f"{PICTURES} data.resident=true": "pictures/cats/3.png: can't be read as an image",
    "write recipe=transformer_translate out=new": "write: DatePairs offers none",
    "write recipe=yolo_shapes out=full": "out=full: exists and isn't empty",
    "write recipe=yolo_shapes out=file": "out=file: can't be made",
    "write recipe=yolo_shapes out=new layout=voc": "layout=voc: must be one of",
    "write recipe=yolo_shapes out=new laiout=coco": "laiout: write takes no such word. Did you mean layout?",
    "evaluate run=empty": "run=empty: is no run's folder",
    "evaluate empty": "empty: a run is named by run=. Did you mean run=empty?",
    "recipe=mine": "recipe=mine: there is no such choice. Folders with more are named by --config-dir=...",
    f"{SMALL} run.dir=new run.resume=nope": "run.resume=nope: does not exist",
}  # fmt: skip

OF_A_RUN = {
    "evaluate run=run checkpoint=step-9": "checkpoint=step-9: run has no such checkpoint",
    "evaluate run=run checkpoint=best.pt": "checkpoint=best.pt: run has no such checkpoint",
    "evaluate run=run checkpoint=weights.pt": "weights.pt: is a file",
    "evaluate run=run prompt=hello": "prompt",
    "evaluate run=run model.width=16": "is of another model",
    "evaluate run=run model=resnet18_32": "is of another model",
    "evaluate run=run data=shapes": "its model's outputs stand for",
    "evaluate run=run data.augment.crop=-2": "data.augment.crop=-2: must be 0 or more",
    "evaluate run=run device=cuda:99": "device=cuda:99: ",
    "predict run=run prompt=x": "predict",
    "export run=run": "format: export needs it: format=..., one of onnx, pt2",
    "export run=run format=tflite": "format=tflite: must be one of onnx, pt2",
    "export run=run format=pt2 out=empty": "out=empty: is a folder",
    "export run=run format=pt2 out=file/x.pt2": "out=file/x.pt2: can't be written",
    "export run=run format=onnx out=name": "out=name: must end in .onnx for format=onnx.",
    "export run=run format=pt2 side=100": "export",
    "export run=run format=openvino precision=fp16 validate=false": "validate=false: a file in",
    f"{SMALL} run.dir=run train.steps=2 model.width=16": "is of another model",
    f"{SMALL} run.dir=run train.steps=2 train.batch_size=32": "train.batch_size",
    f"{SMALL} run.dir=run train.steps=2 seed=5": "seed",
    f"{SMALL} run.dir=run train.steps=2 optim=sgd": "optim",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("requests")
    (folder / "file").write_text("no folder")
    (folder / "empty").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "file").write_text("precious")
    torch.save({"weight": torch.zeros(3)}, folder / "weights.pt")
    for name in ("cats", "dogs"):
        (folder / "pictures" / name).mkdir(parents=True)
        for i in range(10):
            Image.new("RGB", (16, 16), (i, i, i)).save(folder / "pictures" / name / f"{i}.png")
    broken = folder / "pictures" / "cats" / "3.png"
    broken.write_bytes(broken.read_bytes()[:50])
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        monkeypatch.setattr("sys.argv", ["ddptrain"])
        assert main([*SMALL.split(), "train.steps=1", "run.dir=run"]) == 0
    return folder


def listed(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("line", [*REFUSED, *OF_A_RUN])
def test_it_is_refused_with_one_message_and_nothing_changes(
    folder: Path, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["ddptrain"])
    before = listed(folder)
    code = main(line.split())
    printed = capsys.readouterr()
    said = {**REFUSED, **OF_A_RUN}[line]
    assert code == 2, printed.err
    (message,) = re.split(r"^ddptrain: ", printed.err, flags=re.MULTILINE)[1:]
    assert said in message
    assert "Traceback" not in printed.err
    after = {name: content for name, content in listed(folder).items() if not name.endswith("log.txt")}
    assert after == {name: content for name, content in before.items() if not name.endswith("log.txt")}


def test_a_world_that_can_not_share_a_batch_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["ddptrain"])
    for name, value in {"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(BRIEF.split()) == 2
    assert "RANK" in capsys.readouterr().err


def test_a_manifest_of_another_kind_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["ddptrain"])
    (folder / "theirs").mkdir()
    torch.save({"weight": torch.zeros(3)}, folder / "theirs" / "state.pt")
    (folder / "theirs" / "manifest.json").write_text(json.dumps({"format": "safetensors"}))
    assert main([*BRIEF.split(), "run.resume=theirs"]) == 2
    assert "theirs: " in capsys.readouterr().err
