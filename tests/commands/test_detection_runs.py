"""The detector's recipes as a user runs them: what a run leaves behind, how it is judged and resumed, and
what it refuses. What a trained one predicts, and how it is exported: test_detection_export.py."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from detector import LAST, LONGER, ONE_THREAD, SHAPES, custom, written
from labelled import ONE_BOX, label, truncate, yolo_set
from shell import ddptrain, refusal
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torchvision.io import ImageReadMode, decode_image

from ddptrain.data.images.shapes import DISTANCES
from ddptrain.engine.saved_checkpoint import read, unpack

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
POSITION = {"step", "epoch", "samples", "split"}
FOUND, MISSED = torch.tensor([[0x2B, 0x93, 0x48], [0x4D, 0xAB, 0xF7]], dtype=torch.uint8)
"""Colours of true boxes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a finished run on the drawn set."""
    folder = tmp_path_factory.mktemp("detector")
    done = ddptrain(folder, f"{SHAPES} run.dir=run", **ONE_THREAD)
    assert done.code == 0, done.err
    return folder


def lines_of(run: Path, split: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split]


def last_state(run: Path) -> Any:
    return unpack(read(run / LAST))


def decoded(png: bytes) -> Tensor:
    return decode_image(torch.frombuffer(bytearray(png), dtype=torch.uint8))


def torchrun(cwd: Path, ranks: int, words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TORCHRUN, f"--nproc-per-node={ranks}", "-m", "ddptrain", *words.split()],
        cwd=cwd, env={**os.environ, **ONE_THREAD}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


# -- what a run leaves behind -----------------------------------------------------------------------


@pytest.mark.long
def test_each_class_is_judged_and_the_terminal_shows_the_whole(tmp_path: Path) -> None:
    words = f"{SHAPES} train.steps={LONGER} train.eval_every={LONGER // 2} optim.lr=0.005 run.dir=run"
    done = ddptrain(tmp_path, words, **ONE_THREAD)
    assert done.code == 0, done.err
    judged = lines_of(tmp_path / "run", "valid")
    assert [line["step"] for line in judged] == [LONGER // 2, LONGER]
    whole = {"mAP", "mAP50", "mAP75", "AR"}
    for line in judged:
        assert line.keys() == POSITION | whole | {f"{of}/{name}" for of in ("AP", "AR") for name in DISTANCES}
        assert all(0 <= line[name] <= 1 for name in line.keys() - POSITION)
        for of, mean in (("AP", "mAP"), ("AR", "AR")):
            assert line[mean] == pytest.approx(sum(line[f"{of}/{name}"] for name in DISTANCES) / 10)
    assert judged[1]["mAP"] > 0
    assert judged[1]["AR"] > judged[1]["mAP"]
    told = [line for line in done.err.splitlines() if line.startswith("evaluated")]
    assert len(told) == 2
    for line, values in zip(told, judged, strict=True):
        for name in whole:
            assert f"{name} {values[name]:.4f}" in line
    assert "AP/" not in done.err
    assert "AR/" not in done.err


def test_pictures_and_curves_are_left_behind(folder: Path) -> None:
    """Eight validation pictures, four a row, 64 pixels enlarged to 320, with the true boxes."""
    plots = folder / "run/plots"
    shown = decode_image(str(plots / "predictions.png"))
    assert shown.shape == (3, 2 * 324 + 4, 4 * 324 + 4)
    assert sum((shown == colour[:, None, None]).all(0).sum() for colour in (FOUND, MISSED)) > 1000
    mistakes = ("confusion.png", "by_size.png", "against_score.png", "worst.png")
    for name in ("precision_recall.png", "precision_recall_of_classes.png", "curves.png", *mistakes):
        drawn = decode_image(str(plots / name), ImageReadMode.RGB)
        assert drawn.float().std() > 10, f"{name} is blank"


def test_tensorboard_shows_every_evaluation(folder: Path) -> None:
    events = EventAccumulator(str(folder / "run/tensorboard"), {"images": 0, "scalars": 0}).Reload()

    def images(name: str) -> dict[int, Tensor]:
        found = events.Images(name)
        assert len(found) == len({image.step for image in found})
        return {image.step: decoded(image.encoded_image_string) for image in found}

    samples = images("train/samples")
    assert [(step, tuple(sample.shape)) for step, sample in samples.items()] == [(0, (3, 2 * 66, 8 * 66))]
    red = torch.tensor([255, 0, 0], dtype=torch.uint8)
    assert (samples[0] == red[:, None, None]).all(0).any(), "the boxes are drawn in"
    predictions = images("valid/predictions")
    assert list(predictions) == [20, 40]
    assert torch.equal(predictions[40], decode_image(str(folder / "run/plots/predictions.png")))
    assert list(images("valid/precision_recall"))[-1] == 40  # in 2 % of the time not each of them is drawn
    for name in ("mAP", "AR", "AP/disc", "AR/frame"):
        shown = {scalar.step: scalar.value for scalar in events.Scalars(f"valid/{name}")}
        assert shown == pytest.approx({x["step"]: x[name] for x in lines_of(folder / "run", "valid")})


# -- evaluate ---------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_evaluate_repeats_the_last_metrics(folder: Path, ranks: int) -> None:
    """To the last digit, on any number of ranks."""
    if ranks == 1:
        answer = ddptrain(folder, "evaluate run=run checkpoint=last", **ONE_THREAD).out
    else:
        ended = torchrun(folder, ranks, "evaluate run=run checkpoint=last")
        assert ended.returncode == 0, ended.stderr
        answer = ended.stdout
    found = json.loads(answer)
    assert (found.pop("step"), found.pop("checkpoint")) == (40, f"run/{LAST}")
    last = lines_of(folder / "run", "valid")[-1]
    assert found == {name: value for name, value in last.items() if name not in POSITION}


# -- the same training by other ways ----------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "path"), [("yolo", "data.yaml"), ("coco", "annotations/instances_train.json")]
)
def test_written_and_read_again_a_set_trains_alike(
    folder: Path, tmp_path: Path, layout: str, path: str
) -> None:
    """The same bits: pixels are written without loss, and the boxes are whole numbers. One class gets another
    name in the files, for that is where names come from."""
    done = written(tmp_path / "set", layout)
    assert "32 pictures" in done.out
    assert "8 pictures" in done.out
    for file in {tmp_path / "set" / path, tmp_path / "set" / path.replace("train", "val")}:
        assert file.read_text().count("disc") == 1
        file.write_text(file.read_text().replace("disc", "pebble"))
    done = ddptrain(tmp_path, f"{custom(f'set/{path}')} run.dir=run", **ONE_THREAD)
    assert done.code == 0, done.err
    metrics = (tmp_path / "run/metrics.jsonl").read_text()
    assert metrics.count("AP/pebble") == 2
    assert metrics.replace("/pebble", "/disc") == (folder / "run/metrics.jsonl").read_text()
    ours, drawn = last_state(tmp_path / "run"), last_state(folder / "run")
    for part in ("model", "average", "optimizer"):
        assert_same(ours[part], drawn[part], part)


@pytest.mark.long
def test_loader_processes_change_nothing(folder: Path, tmp_path: Path) -> None:
    done = ddptrain(tmp_path, f"{SHAPES} data.workers=1 run.dir=run", **ONE_THREAD)
    assert done.code == 0, done.err
    assert "read by 1 worker a rank" in done.err
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (folder / "run/metrics.jsonl").read_bytes()
    assert_same(last_state(tmp_path / "run"), last_state(folder / "run"))


@pytest.mark.long
def test_a_killed_run_goes_on_to_the_same_end(folder: Path, tmp_path: Path) -> None:
    """By SIGKILL, at some moment after the first evaluation, whose pictures lie there by then."""
    command = [sys.executable, "-m", "ddptrain", *SHAPES.split(), "run.dir=run"]
    started = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, **ONE_THREAD}, stderr=subprocess.DEVNULL
    )
    run = tmp_path / "run"
    while not ((run / "checkpoints/step-20").is_dir() and (run / "plots/predictions.png").is_file()):
        assert started.poll() is None
        time.sleep(0.005)
    started.send_signal(signal.SIGKILL)
    assert started.wait() == -signal.SIGKILL
    assert not (run / LAST).exists()
    assert not (run / "plots/curves.png").exists()
    seen = decode_image(str(run / "plots/predictions.png"))
    done = ddptrain(tmp_path, command[3:], **ONE_THREAD)
    assert done.code == 0, done.err
    assert "plan       steps 20 to 40" in done.err or "plan       steps 30 to 40" in done.err
    assert_same(last_state(run), last_state(folder / "run"))
    assert (run / "metrics.jsonl").read_bytes() == (folder / "run/metrics.jsonl").read_bytes()
    last = decode_image(str(run / "plots/predictions.png"))
    assert torch.equal(last, decode_image(str(folder / "run/plots/predictions.png")))
    assert last.shape == seen.shape


@pytest.mark.long
def test_everything_at_once_runs_through(tmp_path: Path) -> None:
    done = ddptrain(
        tmp_path,
        f"{SHAPES} train.micro_batch=4 precision=bf16 task.multi_scale=0.5 data.augment.degrees=10"
        " data.augment.shear=5 train.steps=12 train.eval_every=12 log.every=1 run.dir=run",
        **ONE_THREAD,
    )
    assert done.code == 0, done.err
    trained = lines_of(tmp_path / "run", "train")
    assert len(trained) == 12
    for line in trained:
        assert all(math.isfinite(line[name]) for name in ("loss", "box", "classes", "distance", "grad_norm"))
        assert line["loss"] > 0
    assert lines_of(tmp_path / "run", "valid")[0]["mAP"] >= 0


# -- what is refused --------------------------------------------------------------------------------

FEW = "device=cpu train.batch_size=2 train.steps=2 run.dir=run"


@pytest.mark.long
def test_every_problem_of_a_set_is_named_at_once(tmp_path: Path) -> None:
    yolo_set(tmp_path / "set", ending=".jpg")
    label(tmp_path / "set", "train", 0, "2 0.5 0.5 0.2 0.2\n")
    label(tmp_path / "set", "train", 1, f"{ONE_BOX}1 0.9 0.5 0.5 0.5\n")
    truncate(tmp_path / "set/images/train/2.jpg")
    message = refusal(tmp_path, custom("set/data.yaml", FEW))
    problems = (
        "set/labels/train/0.txt, line 1: class 2: must be a whole number from 0 to 1",
        "set/labels/train/1.txt, line 2: box 0.9 0.5 0.5 0.5: leaves the picture",
        "set/images/train/2.jpg: can't be read as an image",
    )
    assert "3 problems in this set" in message
    assert all(problem in message for problem in problems)
    assert "data.source.on_error=skip" in message
    assert not (tmp_path / "run").exists()

    done = ddptrain(tmp_path, f"{custom('set/data.yaml', FEW)} data.source.on_error=skip", **ONE_THREAD)
    assert done.code == 0, done.err
    skipped = [line for line in done.err.splitlines() if line.startswith("left out ")]
    assert all(problem in line for problem, line in zip(problems, skipped[:-1], strict=True))
    assert skipped[-1].startswith("left out   3 of the set")
    assert "2 train with 1 boxes, 1 valid" in done.err
    assert "3 left out" in done.err
    assert len(lines_of(tmp_path / "run", "valid")) == 2, "each epoch"


@pytest.mark.long
@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({"nc": 3}, "data.yaml: nc: 3: names lists 2; make them agree"),
        ({"train": "images/none"}, "data.yaml: train: no image found in images/none"),
    ],
)
def test_a_set_that_contradicts_itself_is_refused(
    tmp_path: Path, described: dict[str, Any], said: str
) -> None:
    (tmp_path / "images/none").mkdir(parents=True)
    yolo_set(tmp_path, **described)
    assert said in refusal(tmp_path, custom("data.yaml", FEW))
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("recipe=yolo_custom device=cpu", "data.source.path: say which set: data.source.path=<file>, a data"),
        (
            custom("gone/data.yaml", "device=cpu"),
            "data.source.path=gone/data.yaml: there is no such file or folder.",
        ),
        (f"{SHAPES} data.size=100", "data.size=100: must be a multiple of 32 pixels"),
        (f"{SHAPES} data.augment.zoom=0.9", "data.augment.zoom=0.9: must be in [0, 0.5]"),
        (f"{SHAPES} task.multi_scale=2", "task.multi_scale=2: must be in [0, 1)"),
        (f"{SHAPES} data.size=8192", "data.size=8192: must be a multiple of 32 pixels, at most 4096"),
        (f"{SHAPES} task.box=-1", "task.box=-1"),
        (f"{SHAPES} model=cnn", "model: ddptrain.recipes.cnn.SmallCnn needs in_channels"),
    ],
)
def test_a_wrong_word_is_named(tmp_path: Path, words: str, said: str) -> None:
    assert said in refusal(tmp_path, f"{words} run.dir=run")
    assert not (tmp_path / "run").exists()


def test_a_single_cell_is_too_little_for_batchnorm(tmp_path: Path) -> None:
    words = f"{SHAPES} data.size=32 train.micro_batch=1 run.dir=run"
    assert "data.size=32: the coarsest map of a single picture" in refusal(tmp_path, words)


@pytest.mark.long
def test_a_picture_found_broken_in_training_is_named_once(tmp_path: Path) -> None:
    """Two ranks decode pictures when they need them, without a mosaic one rank each picture. Its header is
    sound, so the set could be opened; it is the last, beyond the 16 that every rank previews."""
    yolo_set(tmp_path, count=20)
    broken = tmp_path / "images/train/9.png"
    content = bytearray(broken.read_bytes())
    start = content.index(b"IDAT") + 40
    content[start : start + 2000] = bytes(2000)
    broken.write_bytes(content)
    late = "train.steps=10 data.resident=false data.augment.mosaic=0"
    ended = torchrun(tmp_path, 2, f"{custom('data.yaml', FEW)} {late}")
    assert ended.returncode == 1  # torchrun's own
    assert "plan       steps 0 to 10" in ended.stderr, "it is found in training, not before"
    assert ended.stderr.count("ddptrain: images/train/9.png: can't be read as an image") == 1, ended.stderr
