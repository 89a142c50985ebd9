"""What a trained detector answers on any pictures, and as a file that runs without ddptrain. The set it was
trained on is gone by then."""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from detector import LONGER, ONE_THREAD, SHAPES, trained_and_moved
from faster_coco_eval import COCO
from labelled import truncate
from PIL import Image
from shell import Ended, ddptrain, refusal
from texts import write_text
from torch import nn
from torchvision.io import decode_image
from torchvision.ops import box_iou

from ddptrain.data.images.shapes import DISTANCES
from ddptrain.engine.load_model import fit_model
from ddptrain.engine.saved_checkpoint import read, unpack
from ddptrain.recipes.yolo.boxes import decoded, detections
from ddptrain.recipes.yolo.model import Yolo
from ddptrain.text import counted

LEAST, OVERLAP, MOST = 0.001, 0.7, 840
"""The little that was learnt gives nearly equal scores: everything that 84 anchors say of ten classes."""
WIDE = (600, 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run, and pictures: six in this folder, two further below, of which one is wide, and a broken one beside
    it."""
    folder = tmp_path_factory.mktemp("detector")
    trained_and_moved(folder)
    assert not (folder / "set").exists()
    pictures = folder / "pictures"
    (pictures / "far/down").mkdir(parents=True)
    (pictures / "000000.png").rename(pictures / "far/000000.png")
    wide = Image.open(pictures / "000001.png").resize(WIDE)
    wide.save(pictures / "far/down/wide.jpg")
    (pictures / "000001.png").unlink()
    (folder / "broken").mkdir()
    shutil.copy(pictures / "far/down/wide.jpg", folder / "broken/cut.jpg")
    truncate(folder / "broken/cut.jpg")
    return folder


@pytest.fixture(scope="module")
def seen(folder: Path) -> Path:
    """What `predict` wrote of the folder of pictures, called from another folder."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    done = predict(elsewhere, "run=../run source=../pictures out=new/seen score=0.001")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        *(f"../pictures/{name}" for name in named(folder / "pictures")),
        "new/seen",
    ]
    assert " square" in done.out
    return elsewhere / "new/seen"


def predict(cwd: Path, words: str) -> Ended:
    return ddptrain(cwd, f"predict {words}", **ONE_THREAD)


def named(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*.*"))


def boxes_of(file: Path, width: int, height: int) -> list[list[float]]:
    """Of a label file: label, x, y, width and height in pixels."""
    rows = [[float(word) for word in line.split()] for line in file.read_text().splitlines()]
    return [
        [label, (x - w / 2) * width, (y - h / 2) * height, w * width, h * height]
        for label, x, y, w, h in rows
    ]


# -- predict ----------------------------------------------------------------------------------------


@pytest.mark.long
def test_pictures_labels_and_json_say_the_same(folder: Path, seen: Path) -> None:
    names = named(folder / "pictures")
    assert len(names) == 8
    stems = [name.rpartition(".")[0] for name in names]
    assert named(seen / "pictures") == [f"{stem}.png" for stem in stems]
    assert named(seen / "labels") == [f"{stem}.txt" for stem in stems]
    assert decode_image(str(seen / "pictures/000002.png")).shape == (3, 320, 320)
    assert decode_image(str(seen / "pictures/far/down/wide.png")).shape == (3, 10, 600)

    content = COCO(str(seen / "predictions.json"))
    assert [content.cats[i]["name"] for i in sorted(content.cats)] == list(DISTANCES)
    assert [image["file_name"] for image in content.imgs.values()] == names
    assert len({one["id"] for one in content.anns.values()}) == len(content.anns) > 100
    for number, image in content.imgs.items():
        width, height = image["width"], image["height"]
        assert (width, height) == (WIDE if "wide" in image["file_name"] else (64, 64))
        found = content.loadAnns(content.getAnnIds(imgIds=[number]))
        scores = [one["score"] for one in found]
        assert scores == sorted(scores, reverse=True)
        assert all(0.001 <= score <= 1 for score in scores)
        told = boxes_of(seen / f"labels/{Path(image['file_name']).with_suffix('.txt')}", width, height)
        for one, (label, *box) in zip(found, told, strict=True):
            assert one["category_id"] == label + 1
            assert one["bbox"] == pytest.approx(box, abs=2e-6 * width)
            assert one["area"] == one["bbox"][2] * one["bbox"][3]
            x, y, w, h = one["bbox"]
            assert x >= 0
            assert y >= 0
            assert x + w <= width + 1e-4
            assert y + h <= height + 1e-4


@pytest.mark.long
def test_every_box_can_be_trained_on(seen: Path) -> None:
    """Labels are there to be corrected and trained on, and a set with boxes of no area is refused; also those
    that were found in the grey bars beside a wide picture."""
    for one in json.loads((seen / "predictions.json").read_text())["annotations"]:
        assert one["area"] > 0, one


@pytest.mark.long
def test_a_file_and_a_pattern(folder: Path, seen: Path, tmp_path: Path) -> None:
    """They show what the folder showed, each picture by itself."""
    for source, count in (("pictures/far/000000.png", 1), ("pictures/**/0*[023].png", 3)):
        done = predict(tmp_path, f"run={folder}/run source={folder}/{source} out=out{count} score=0.001")
        assert done.code == 0, done.err
        assert (
            f"out{count}: pictures, labels and predictions.json for {counted(count, 'picture')}\n" in done.out
        )
    assert named(tmp_path / "out1/labels") == ["000000.txt"]
    assert named(tmp_path / "out3/labels") == ["000002.txt", "000003.txt", "far/000000.txt"]
    for ours, other in (
        ("out1/labels/000000.txt", "far/000000.txt"),
        ("out3/labels/000003.txt", "000003.txt"),
    ):
        assert (tmp_path / ours).read_text() == (seen / "labels" / other).read_text()


@pytest.mark.long
def test_little_is_said_where_little_is_sure(folder: Path, tmp_path: Path) -> None:
    done = predict(tmp_path, f"run={folder}/run source={folder}/pictures/000002.png score=1 checkpoint=best")
    assert done.code == 0, done.err
    assert "000002.png: nothing\n" in done.out
    assert (tmp_path / "predictions/labels/000002.txt").read_text() == ""
    assert json.loads((tmp_path / "predictions/predictions.json").read_text())["annotations"] == []
    again = refusal(tmp_path, f"predict run={folder}/run source={folder}/pictures", **ONE_THREAD)
    assert "out=predictions: exists and isn't empty" in again


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("source=none/*.png", "source=none/*.png: names no picture (.jpg"),
        ("source=pictures score=1.5", "score=1.5: must be in [0, 1]"),
        ("source=pictures scor=0.5", "scor: predict takes no such word. Did you mean score?"),
        ("source=broken", "broken/cut.jpg: can't be read as an image"),
        ("out=new", "source: predict needs it: source=..."),
    ],
)
def test_what_predict_is_asked_is_checked(folder: Path, words: str, said: str) -> None:
    assert said in refusal(folder, f"predict run=run {words}", **ONE_THREAD)
    assert not (folder / "predictions").exists()


# -- export -----------------------------------------------------------------------------------------

RUN_ONNX = """
import sys
from collections import Counter
import numpy
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
numpy.savez(sys.argv[3], *session.run(None, {"images": numpy.load(sys.argv[2])}))
assert not {"ddptrain", "torch"} & sys.modules.keys()
"""
RUN_PT2 = """
import sys
from collections import Counter
import numpy
import torch
import torchvision
outputs = torch.export.load(sys.argv[1]).module()(torch.from_numpy(numpy.load(sys.argv[2])))
outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
numpy.savez(sys.argv[3], *[output.detach().numpy() for output in outputs])
assert "ddptrain" not in sys.modules
"""


@pytest.fixture(scope="module")
def eager(folder: Path) -> nn.Module:
    model = Yolo(num_classes=10).eval()
    state = unpack(read(folder / f"run/checkpoints/step-{LONGER}"))
    fit_model(model, state["average"]["weights"], "the run")
    return model


def outputs_of(model: Path, images: torch.Tensor) -> list[torch.Tensor]:
    """Run by an interpreter that knows nothing of ddptrain."""
    given, answer = model.with_suffix(".npy"), model.with_suffix(".npz")
    np.save(given, images.numpy())
    program = RUN_ONNX if model.suffix == ".onnx" else RUN_PT2
    ended = subprocess.run(
        [sys.executable, "-I", "-c", program, model, given, answer],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    with np.load(answer) as arrays:
        return [torch.from_numpy(arrays[name]) for name in arrays.files]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["pt2", "onnx"])
def test_every_anchor_of_an_export_says_what_eager_says(
    folder: Path, tmp_path: Path, eager: nn.Module, kind: str
) -> None:
    target = tmp_path / f"new/model.{kind}"
    done = ddptrain(
        folder, f"export run=run checkpoint=last format={kind} batch=2 out={target}", **ONE_THREAD
    )
    assert done.code == 0, done.err
    assert "input      images, float32 (2, 3, 64, 64)" in done.err
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    boxes, scores = outputs_of(target, images)
    with torch.no_grad():
        raw = eager(images)
    assert boxes.shape == (2, 84, 4)
    torch.testing.assert_close(scores, raw.classes.sigmoid(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(boxes, decoded(raw), rtol=1e-3, atol=1e-2)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["pt2", pytest.param("onnx", marks=pytest.mark.long)])
def test_an_exported_list_is_what_eager_finds(
    folder: Path, tmp_path: Path, eager: nn.Module, kind: str
) -> None:
    target = tmp_path / f"model.{kind}"
    words = f"format={kind} nms=true batch=2 most={MOST} score={LEAST} out={target}"
    done = ddptrain(folder, f"export run=run checkpoint=last {words}", **ONE_THREAD)
    assert done.code == 0, done.err
    images = torch.stack([decode_image(str(folder / f"pictures/00000{n}.png")) / 255 for n in (2, 3)])
    [listed] = outputs_of(target, images)
    assert listed.shape == (2, MOST, 6)
    with torch.no_grad():
        raw = eager(images)
    every = zip(
        listed, decoded(raw), raw.classes.sigmoid(), detections(raw, LEAST, OVERLAP, MOST), strict=True
    )
    for rows, boxes, scores, found in every:
        count = int((rows[:, 4] > 0).sum())
        assert not rows[count:].any()
        assert MOST > count > 20
        assert abs(count - len(found.labels)) <= 2, "rounding may decide which of two doubles stays"
        torch.testing.assert_close(rows[:20, 4], found.scores[:20], rtol=1e-3, atol=1e-5)
        for row in rows[:count]:
            own = (boxes - row[:4]).abs().amax(1) < 1e-2
            assert (scores[own, int(row[5])] - row[4]).abs().amin() < 1e-5, "what some anchor says"
        rows = rows[:count]
        overlaps = box_iou(rows[:, :4], rows[:, :4]) * (rows[:, 5:] == rows[:, 5])
        assert overlaps.fill_diagonal_(0).max() < OVERLAP + 1e-3


@pytest.mark.long
def test_a_program_that_knows_the_json_alone_finds_what_predict_finds(folder: Path, tmp_path: Path) -> None:
    """That of docs/detection.md, without torch, on pictures of any shape: to 0.1 pixel and 1e-3 of score."""
    done = ddptrain(
        folder,
        f"export run=run format=onnx nms=true score=0.002 most=1000 out={tmp_path}/model.onnx",
        **ONE_THREAD,
    )
    assert done.code == 0, done.err
    page = (Path(__file__).parents[2] / "docs/detection.md").read_text()
    [program] = [part for part in page.split("```python\n")[1:] if "onnxruntime" in part]
    shutil.copytree(folder / "pictures", tmp_path / "pictures")
    grey = np.asarray(Image.open(tmp_path / "pictures/far/000000.png").convert("L"))
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "pictures/grey.png")  # of 16 bits
    pictures = sorted(str(file) for file in (tmp_path / "pictures").rglob("*.*"))
    plain = "assert 'torch' not in sys.modules"
    ended = subprocess.run(
        [sys.executable, "-c", f"{program.partition('```')[0]}\n{plain}", *pictures],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    done = predict(folder, f"run=run source={tmp_path}/pictures out={tmp_path}/seen score=0.002")
    assert done.code == 0, done.err
    seen = COCO(str(tmp_path / "seen/predictions.json"))
    names = {image["file_name"]: number for number, image in seen.imgs.items()}
    count = 0
    for line in ended.stdout.splitlines():
        path, kind, score, *corners = line.split("\t")
        x1, y1, x2, y2 = map(float, corners)
        one = names[str(Path(path).relative_to(tmp_path / "pictures"))]
        [class_id] = seen.getCatIds(catNms=[kind])
        boxes = [
            [*one["bbox"], one["score"]]
            for one in seen.loadAnns(seen.getAnnIds(imgIds=[one], catIds=[class_id]))
        ]
        own = np.array([x1, y1, x2 - x1, y2 - y1, float(score)])
        apart = np.abs(np.array(boxes) - own) / [0.1, 0.1, 0.2, 0.2, 1e-3]
        assert apart.max(axis=1).min() <= 1, line
        count += 1
    assert count == len(seen.anns) > 20


@pytest.fixture(scope="module")
def with_set(folder: Path) -> Path:
    """A run whose data set is there, with pictures enough for metrics that a rounding does not halve."""
    more = "data.source.train=300 data.source.valid=40 train.steps=300 ema.decay=0.95"
    words = f"{SHAPES} {more} run.dir=drawn"
    done = ddptrain(folder, words, **ONE_THREAD)
    assert done.code == 0, done.err
    return folder / "drawn"


def exported(run: Path, words: str, file: Path) -> str:
    """What the log says."""
    done = ddptrain(run.parent, f"export run={run} format=openvino {words} out={file}", **ONE_THREAD)
    assert done.code == 0, done.err
    assert named(file.parent) == ["model.bin", "model.xml", "model.xml.json", "model.xml.png"]
    return done.err


@pytest.mark.long
def test_a_smaller_file_of_openvino_says_nearly_the_same(with_set: Path, tmp_path: Path) -> None:
    import openvino

    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1)).numpy()
    outputs = {}
    for precision in ("fp32", "fp16", "int8"):
        file = tmp_path / precision / "model.xml"
        told = exported(with_set, f"nms=false precision={precision} validate=true", file)
        assert ("checked    against eager" in told) == (precision == "fp32")
        theirs, model = (float(part) for part in re.findall(r"AR (\S+) \((\S+)\)", told)[0])
        assert model > 0
        assert model - theirs < 0.01
        if precision != "int8":  # which may be better by chance
            assert abs(theirs - model) < {"fp32": 1e-6, "fp16": 1e-3}[precision]
        network = openvino.Core().read_model(file)
        outputs[precision] = list(openvino.compile_model(network, "CPU")(images).values())
    boxes, scores = outputs["fp32"]
    assert (boxes.shape, scores.shape) == ((1, 84, 4), (1, 84, 10))
    surest = scores[0].max(axis=1).argsort()[-10:]  # int8's boxes of anchors that see nothing lie anywhere
    for precision, anchors, pixels, share in (("fp16", slice(None), 0.1, 1e-3), ("int8", surest, 2.0, 0.01)):
        other_boxes, other_scores = outputs[precision]
        assert 0 < np.abs(other_boxes - boxes)[:, anchors].mean() < pixels
        assert 0 < np.abs(other_scores - scores).mean() < share
    sizes = {precision: (tmp_path / precision / "model.bin").stat().st_size for precision in outputs}
    assert sizes["int8"] < sizes["fp16"] < sizes["fp32"]


@pytest.mark.long
def test_a_file_of_openvino_holds_what_the_json_says(with_set: Path, tmp_path: Path) -> None:
    import openvino

    exported(with_set, "nms=true precision=int8 score=0.01 most=7", tmp_path / "file/model.xml")
    network = openvino.Core().read_model(tmp_path / "file/model.xml")
    operations = Counter(operation.get_type_name() for operation in network.get_ops())
    # an activation in pieces would be quantised in pieces, and int8 no faster than bf16
    assert operations["Swish"] > operations["Sigmoid"]
    about = json.loads((tmp_path / "file/model.xml.json").read_text())
    assert json.loads(network.get_rt_info(["ddptrain"]).astype(str)) == about
    assert about["classes"] == list(DISTANCES)
    assert about["score"] == 0.01
    assert list(about["outputs"]) == ["detections"]
    [listed] = openvino.compile_model(network, "CPU")(torch.rand(1, 3, 64, 64).numpy()).values()
    assert listed.shape == (1, 7, 6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("format=onnx precision=int8", "precision=int8: format=onnx is written in fp32 only."),
        ("format=openvino out=model.onnx", "out=model.onnx: must end in .xml for format=openvino."),
        ("format=openvino precision=int4", "precision=int4: must be one of fp32, fp16, int8"),
        ("format=openvino precision=int8", "set/data.yaml"),
    ],
)
def test_what_a_precision_needs_is_said(words: str, said: str, folder: Path) -> None:
    """Of a run whose set is gone, too."""
    assert said in refusal(folder, f"export run=run {words}", **ONE_THREAD)


@pytest.mark.long
def test_an_export_that_nothing_was_compared_of_says_so(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.pt2"
    done = ddptrain(
        folder, f"export run=run checkpoint=last format=pt2 nms=true score=1 out={target}", **ONE_THREAD
    )
    assert done.code == 0, done.err
    assert "UNCHECKED" in done.err
    assert "a lower score=... or a higher most=...; this one was nms=True batch=1 score=1.0" in done.err
    assert "checked    against eager" not in done.err
    assert named(tmp_path) == ["model.pt2", "model.pt2.json"]


@pytest.mark.long
def test_each_file_has_its_own_json(folder: Path, tmp_path: Path) -> None:
    export = f"export run=run checkpoint=last out={tmp_path}/model"
    for words in ("{}.pt2 format=pt2 nms=false", "{}.onnx format=onnx nms=true score=0.01"):
        done = ddptrain(folder, words.format(export), **ONE_THREAD)
        assert done.code == 0, done.err
    told = {kind: json.loads((tmp_path / f"model.{kind}.json").read_text()) for kind in ("pt2", "onnx")}
    assert [list(told[kind]["outputs"]) for kind in ("pt2", "onnx")] == [["boxes", "scores"], ["detections"]]
    (tmp_path / "model.onnx").unlink()
    refused = refusal(folder, f"{export}.onnx format=onnx", **ONE_THREAD)
    assert f"{tmp_path}/model.onnx.json, which is written beside it, exists already" in refused


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "format: export needs it: format=..., one of onnx, pt2, openvino."),
        ("format=tflite", "format=tflite: must be one of onnx, pt2"),
        ("fromat=pt2", "fromat: export takes no such word. Did you mean format?"),
        ("format=pt2 nsm=true", "nsm: export takes no such word. Did you mean nms?"),
        (
            "format=onnx batch=two nms=yes",
            "batch=two: must be a whole number.\nnms=yes: must be true or false",
        ),
        ("format=pt2 batch=0", "batch=0"),
        ("format=pt2 out=elsewhere", "out=elsewhere: is a folder"),
        ("format=pt2 out=broken/cut.jpg/model.pt2", "can't be written ("),
    ],
)
def test_what_export_is_asked_is_checked(folder: Path, seen: Path, words: str, said: str) -> None:
    before: list[Any] = named(folder / "run")
    assert said in refusal(folder, f"export run=run {words}", **ONE_THREAD)
    assert named(folder / "run") == before


@pytest.mark.long
def test_what_offers_no_export_says_so(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    done = ddptrain(
        tmp_path,
        "recipe=lstm_text device=cpu data=text data.source.path=text.txt data.window=16 data.valid_piece=64"
        " data.valid_context=16 model.width=16 model.ngram_rows=64 model.ngram_width=8 train.batch_size=8"
        " train.steps=1 run.dir=run",
        **ONE_THREAD,
    )
    assert done.code == 0, done.err
    message = refusal(tmp_path, "export run=run format=onnx", **ONE_THREAD)
    assert "export: LanguageModelling has none" in message
    assert not (tmp_path / "run/model.onnx").exists()
