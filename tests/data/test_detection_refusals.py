"""What is wrong with a set of pictures with boxes is said with its place, its value and the rule: YOLO's
layout, and what all share."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from labelled import ONE_BOX, label, picture, refusal, truncate, yolo_set
from PIL import Image

from ddptrain.data.detection.anyfiles import LabelledFiles
from ddptrain.data.detection.coco import CocoFiles
from ddptrain.data.detection.yolo import YoloFiles
from ddptrain.errors import UserError

NOWHERE = Path("nowhere")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("2 0.5 0.5 0.1 0.1", "class 2: must be a whole number from 0 to 1 (data.yaml names 2 classes)."),
        ("-1 0.5 0.5 0.1 0.1", "class -1: must be a whole number from 0 to 1"),
        ("0.5 0.5 0.5 0.1 0.1", "class 0.5: must be a whole number from 0 to 1"),
        ("dog 0.5 0.5 0.1 0.1", "'dog': must be a number."),
        ("0 0.5 nan 0.1 0.1", "'nan': must be a number."),
        ("0 0.5 0.5 0.1 inf", "'inf': must be a number."),
        ("0 0.5 0.5 0,1 0.1", "'0,1': must be a number."),
        ("0 0.5 0.5 0.1", "4 columns: must be 5 (class cx cy w h), or for a polygon an odd number from 7"),
        ("0 0.5 0.5 0.1 0.1 0.9", "6 columns: must be 5"),
        ("0 0.1 0.1 0.5 0.1 0.5 0.5 0.1", "8 columns: must be 5"),
        ("0 0.50 0.5 0.1 0", "box 0.50 0.5 0.1 0: has no area; width and height must be more than 0."),
        ("0 0.5 0.5 -0.1 0.1", "box 0.5 0.5 -0.1 0.1: has no area"),
        (
            "0 0.96 0.5 0.1 0.1",
            "box 0.96 0.5 0.1 0.1: leaves the picture of 40x30 pixels; its edges must lie",
        ),
        ("0 0.5 0.04 0.1 0.1", "must lie within 0..1 (0.001 beyond counts as rounding"),
        ("0 20 15 10 15", "leaves the picture"),
        ("0 1.0004 0.5 0.001 0.5", "has no area within the picture."),
        ("0 0.1 0.1 0.5 0.1 0.5 1.5", "polygon 0.1 0.1 0.5 0.1 0.5 1.5 ...: leaves the picture"),
    ],
)
def test_a_bad_line_is_told_and_left_out(line: str, told: str, tmp_path: Path) -> None:
    file = yolo_set(tmp_path)
    bad = label(tmp_path, "train", 1, f"{ONE_BOX}\n{line}\n{ONE_BOX}")
    message = refusal(YoloFiles(str(file)))
    assert f"{bad}, line 3: {told}" in message or (
        f"{bad}, line 3: box {line[2:]}: " in message and told in message
    )
    assert "1 problem in this set" in message
    assert "data.source.on_error=skip" in message
    opened = YoloFiles(str(file), on_error="skip").open(NOWHERE)
    assert [len(one) for one in opened.train.objects] == [1, 2, 1]
    assert len(opened.skipped) == 1
    assert f"  {opened.skipped[0]}\n" in message


@pytest.mark.parametrize("ending", [".jpg", ".webp", ".bmp"])
@pytest.mark.parametrize(
    ("spoil", "place", "told", "left"),
    [
        (lambda image, label: truncate(image), "images/train/1.", "can't be read as an image (", 2),
        (lambda image, label: image.write_text("no"), "images/train/1.", "(cannot identify", 2),
        (lambda image, label: label.unlink(), "images/train/1.", "An empty file says", 2),
        (lambda image, label: label.with_stem("8").touch(), "labels/train/8.txt", "there is no image for", 3),
        (
            lambda image, label: picture(image.with_suffix(".png")),
            "images/train/1.",
            "has the same labels",
            3,
        ),
        (lambda image, label: label.write_bytes(b"\xff1"), "labels/train/1.txt", "is not UTF-8 text", 2),
    ],
)
def test_a_bad_picture_is_told_and_left_out(
    spoil: Callable[[Path, Path], object], place: str, told: str, left: int, ending: str, tmp_path: Path
) -> None:
    file = yolo_set(tmp_path, ending=ending)
    spoil(tmp_path / "images" / "train" / f"1{ending}", tmp_path / "labels" / "train" / "1.txt")
    message = refusal(YoloFiles(str(file)))
    (line,) = [line for line in message.splitlines() if told in line]
    assert f"{tmp_path}/{place}" in line
    opened = YoloFiles(str(file), on_error="skip").open(NOWHERE)
    assert len(opened.train) == left
    assert [f"  {one}" for one in opened.skipped] == [line]


@pytest.mark.parametrize("share", [0.3, 0.9, 0.99])
@pytest.mark.parametrize("ending", [".png", ".jpg", ".webp"])
def test_a_cut_picture_is_found_at_opening(ending: str, share: float, tmp_path: Path) -> None:
    file = yolo_set(tmp_path, ending=ending)
    cut = tmp_path / "images" / "train" / f"1{ending}"
    truncate(cut, share)
    assert f"{cut}: can't be read as an image" in refusal(YoloFiles(str(file)))


def test_a_picture_that_breaks_after_opening_is_named(tmp_path: Path) -> None:
    scenes = YoloFiles(str(yolo_set(tmp_path))).open(NOWHERE).train
    truncate(tmp_path / "images" / "train" / "1.png")
    with pytest.raises(UserError, match=r"images/train/1\.png: can't be read as an image") as caught:
        scenes.image(1)
    assert not caught.value.everywhere
    Image.new("RGB", (9, 8)).save(tmp_path / "images" / "train" / "1.png")
    with pytest.raises(UserError, match=r"1\.png: is 9x8 pixels and was 40x30") as caught:
        scenes.image(1)
    assert not caught.value.everywhere


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    file = yolo_set(tmp_path)
    label(tmp_path, "train", 0, "5 0.5 0.5 0.1 0.1\n" * 18)
    label(tmp_path, "val", 0, "1 2 3\n" * 10)
    (tmp_path / "images" / "train" / "2.png").unlink()
    message = refusal(YoloFiles(str(file)))
    assert "29 problems" in message
    assert len(re.findall("class 5", message)) == 18
    assert "2.txt: there is no image" in message
    assert message.count("3 columns") == 1
    assert message.splitlines()[-2] == "  and 9 more"
    opened = YoloFiles(str(file), on_error="skip").open(NOWHERE)
    assert len(opened.skipped) == 29
    assert (len(opened.train), len(opened.valid)) == (2, 1)


def test_a_set_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    file = yolo_set(tmp_path)
    (tmp_path / "labels" / "val" / "0.txt").unlink()
    message = refusal(YoloFiles(str(file), on_error="skip"))
    assert "no picture is left for validation" in message
    assert "0.png: has no labels" in message
    assert "every tenth" in refusal(YoloFiles(str(yolo_set(tmp_path / "few", val=None))))


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("train: [images\nnames: [a]", "(line 2, column "),
        ("- a", "must hold the keys train"),
        ("names: [cat, dog]", "the key train is missing"),
        ("train: 3\nnames: [cat]", "train: 3: must be a folder"),
        ("train: images/none\nnames: [cat]", "images/none is neither a folder of images nor a .txt file"),
        ("train: labels/train\nnames: [cat]", "train: no image found in labels/train (looked for .jpg"),
        ("train: images/train\nval: images/empty\nnames: [cat]", "val: images/empty:"),
        ("train: images/train", "names: must list the classes"),
        ("train: images/train\nnames: [cat, dog, cat]", "names: classes 0 and 2 are both called cat"),
        ("train: images/train\nnames: [cat, ' ']", "names: class 1 is called ' '"),
        ("train: images/train\nnames: [2020-13-45]", "is not YAML"),
        ("train: images/train\nnames: []", "names: must list the classes"),
        ("train: images/train\nnames: {1: cat, 2: dog}", "numbered 1, 2; must count up from 0"),
        ("train: images/train\nnames: [cat, dog]\nnc: 3", "nc: 3: names lists 2"),
        ("train: images/train\nnames: [yes, no]", "YAML reads class 0 as True; put its name in quotes"),
        ("path: gone\ntrain: images/train\nnames: [cat]", "path: gone: there is no such folder"),
        ("train: images/train\nnames: [cat]\nkpt_shape: [17, 3]", "keypoints"),
    ],
)
def test_a_bad_yaml_is_refused(text: str, told: str, on_error: Any, tmp_path: Path) -> None:
    file = yolo_set(tmp_path)
    file.write_text(text)
    message = refusal(YoloFiles(str(file), on_error))
    assert str(file) in message
    assert told in message


def test_a_list_names_what_is_missing_or_twice_by_line(tmp_path: Path) -> None:
    file = yolo_set(tmp_path, train="train.txt")
    listed = tmp_path / "train.txt"
    listed.write_text("images/train/0.png\n\n./images/train/7.png\nimages/train/1.png\nimages/train/0.png\n")
    message = refusal(YoloFiles(str(file)))
    assert f"{listed}, line 3: ./images/train/7.png: there is no such image." in message
    assert f"{tmp_path}/images/train/0.png: is listed twice" in message
    assert len(YoloFiles(str(file), on_error="skip").open(NOWHERE).train) == 2


@pytest.mark.parametrize("kind", [YoloFiles, CocoFiles, LabelledFiles])
def test_a_path_must_be_given_and_be_there(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.source\.path: say which set: "):
        kind()
    for ending in (".yaml", ".json"):
        said = refusal(kind(str(tmp_path / f"gone{ending}")))
        assert f"data.source.path={tmp_path}/gone{ending}: there is no such file or folder." in said
    with pytest.raises(UserError, match=r"data\.source\.valid_path=.*gone: there is no such file"):
        CocoFiles(str(tmp_path), str(tmp_path / "gone")).open(NOWHERE)


@pytest.mark.parametrize("path", ["images", "data.txt"])
def test_another_kind_of_file_is_refused(path: str) -> None:
    for source in (LabelledFiles(path), LabelledFiles(path).forgiving()):
        with pytest.raises(
            UserError, match=rf"data\.source\.path={path}: there is no .* must name a data\.yaml"
        ):
            source.open(NOWHERE)


def test_what_lies_in_hidden_folders_is_no_label(tmp_path: Path) -> None:
    """What notebooks leave there."""
    file = yolo_set(tmp_path)
    (tmp_path / "labels/train/.ipynb_checkpoints").mkdir()
    (tmp_path / "labels/train/.ipynb_checkpoints/3-checkpoint.txt").write_text(ONE_BOX)
    assert len(YoloFiles(str(file)).open(NOWHERE).train) == 3
