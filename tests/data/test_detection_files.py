"""Sets of pictures with boxes on disk: every layout that is read, and what is written comes back."""

import json
import math
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from labelled import HEIGHT, ONE_BOX, WIDTH, coco_content, coco_set, label, picture, voc_set, yolo_set
from PIL import Image

from ddptrain.data.detection.anyfiles import LabelledFiles
from ddptrain.data.detection.coco import CocoFiles
from ddptrain.data.detection.files import FileScenes, probe
from ddptrain.data.detection.source import ArrayScenes, DetectionSet, Objects, Scenes
from ddptrain.data.detection.voc import CLASSES, VocFiles
from ddptrain.data.detection.write import write_coco, write_yolo
from ddptrain.data.detection.yolo import YoloFiles
from ddptrain.errors import UserError

NOWHERE = Path("nowhere")


def boxes(scenes: Scenes, i: int = 0) -> list[list[float]]:
    found: list[list[float]] = scenes.objects[i].boxes.tolist()
    return found


def scenes_of(objects: list[Objects], seed: int, names: list[str] | None = None) -> ArrayScenes:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (len(objects), 3, HEIGHT, WIDTH), generator=generator).to(torch.uint8)
    return ArrayScenes(pixels, objects, names or [f"{seed}/{i}.jpg" for i in range(len(objects))])


def objects_of(rows: list[tuple[list[float], int, bool]]) -> Objects:
    return Objects(
        torch.tensor([box for box, _, _ in rows], dtype=torch.float32).view(-1, 4),
        torch.tensor([label for _, label, _ in rows], dtype=torch.int64),
        torch.tensor([crowd for _, _, crowd in rows], dtype=torch.bool),
    )


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[float], int, bool]:
    def span(side: int) -> tuple[float, float]:
        first = draw(st.floats(0, side - 1))
        return first, draw(st.floats(first + 0.5, side))

    (x1, x2), (y1, y2) = span(WIDTH), span(HEIGHT)
    return [x1, y1, x2, y2], draw(st.integers(0, 2)), draw(st.booleans())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(rows(), max_size=4), min_size=2, max_size=4))
def test_what_is_written_comes_back(drawn: list[list[tuple[list[float], int, bool]]]) -> None:
    objects = [objects_of(one) for one in drawn]
    written = DetectionSet(scenes_of(objects[1:], 0), scenes_of(objects[:1], 1), ["a cat", "no", "küche: 1"])
    with tempfile.TemporaryDirectory() as folder:
        yolo, coco = Path(folder, "images", "yolo"), Path(folder, "coco")
        write_yolo(written, yolo)
        write_coco(written, coco)
        for source, crowds in (
            (YoloFiles(str(yolo / "data.yaml")), False),
            (CocoFiles(str(coco / "annotations" / "instances_train.json")), True),
        ):
            read = source.open(NOWHERE)
            assert list(read.classes) == list(written.classes)
            for now, before in ((read.train, written.train), (read.valid, written.valid)):
                assert torch.equal(now.sizes, before.sizes)
                for i in range(len(before)):
                    kept = before.objects[i].crowd.logical_not() | crowds
                    assert torch.equal(now.image(i), before.image(i))
                    assert torch.equal(now.objects[i].labels, before.objects[i].labels[kept])
                    assert torch.equal(now.objects[i].crowd, before.objects[i].crowd[kept])
                    torch.testing.assert_close(
                        now.objects[i].boxes, before.objects[i].boxes[kept], atol=1e-3, rtol=0
                    )


@pytest.mark.parametrize("write", [write_yolo, write_coco])
def test_boxes_on_wide_pictures_come_back(write: object, tmp_path: Path) -> None:
    objects = [objects_of([([1234.567, 0, 9876.543, 2], 0, False)])]
    scenes = ArrayScenes(torch.zeros(1, 3, 2, 10_000, dtype=torch.uint8), objects, ["wide"])
    assert callable(write)
    write(DetectionSet(scenes, scenes, ["x"]), tmp_path / "out")
    (file,) = [*tmp_path.rglob("data.yaml"), *tmp_path.rglob("instances_train.json")]
    read = LabelledFiles(str(file)).open(NOWHERE)
    torch.testing.assert_close(read.train.objects[0].boxes, objects[0].boxes, atol=1e-3, rtol=0)


def test_writing_tells_what_yolo_cannot_express(tmp_path: Path) -> None:
    box = [1.0, 1.0, 9.0, 9.0]
    scenes = scenes_of([objects_of([(box, 0, True), (box, 0, False), (box, 0, True)])], 0)
    lines = write_yolo(DetectionSet(scenes, scenes, ["x"]), tmp_path / "out")
    assert any("4 crowd regions" in line for line in lines)
    assert any("1 pictures with 1 boxes" in line for line in lines)


def test_written_names_are_safe_and_their_own(tmp_path: Path) -> None:
    names = ["../../x y/1.png", "../../x y/1.jpg", "X_Y_1.bmp", "", "e" * 300, "a/b.c.png", "-.-"]
    scenes = scenes_of([objects_of([]) for _ in names], 0, names)
    write_yolo(DetectionSet(scenes, scenes, ["x"]), tmp_path / "out")
    files = sorted(file.stem for file in (tmp_path / "out" / "images" / "train").iterdir())
    assert len({file.lower() for file in files}) == len(names)
    assert {"x_y_1", "a_b.c"} <= set(files)
    read = YoloFiles(str(tmp_path / "out" / "data.yaml")).open(NOWHERE)
    assert len(read.train) == len(names)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("write", [write_yolo, write_coco])
def test_files_are_copied_as_they_are(write: object, tmp_path: Path) -> None:
    yolo_set(tmp_path / "set", ending=".JPG")
    assert callable(write)
    write(YoloFiles(str(tmp_path / "set" / "data.yaml")).open(NOWHERE), tmp_path / "out")
    copies = {path.read_bytes() for path in (tmp_path / "out").rglob("*.jpg")}
    assert copies == {path.read_bytes() for path in (tmp_path / "set").rglob("*.JPG")}
    (tmp_path / "empty").mkdir()
    write(YoloFiles(str(tmp_path / "set" / "data.yaml")).open(NOWHERE), tmp_path / "empty")
    with pytest.raises(UserError, match=r"out=.*out: exists and isn't empty"):
        write(YoloFiles(str(tmp_path / "set" / "data.yaml")).open(NOWHERE), tmp_path / "out")


def test_yolo_reads_pictures_boxes_and_names(tmp_path: Path) -> None:
    file = yolo_set(tmp_path, names={1: "dog", 0: "cat"}, nc=2)
    label(tmp_path, "train", 1, "\n0 0.9 0.5 0.2008 0.5\r\n\n1 0.5 0.5 1.001 1\n")
    label(tmp_path, "train", 2, "")
    (tmp_path / "labels" / "train" / "classes.txt").write_text("cat\ndog\n")
    for of_macos in ("labels/train/._0.txt", "images/train/._0.png"):
        (tmp_path / of_macos).write_bytes(b"\0")
    opened = YoloFiles(str(file)).open(NOWHERE)
    assert list(opened.classes) == ["cat", "dog"]
    assert list(opened.train.names) == [f"images/train/{i}.png" for i in range(3)]
    assert opened.train.sizes.tolist() == [[HEIGHT, WIDTH]] * 3
    assert boxes(opened.train) == [[15, 7.5, 25, 22.5]]
    assert boxes(opened.train, 1)[0] == pytest.approx([31.984, 7.5, WIDTH, 22.5])
    assert boxes(opened.train, 1)[1] == [0, 0, WIDTH, HEIGHT]
    assert opened.train.objects[1].labels.tolist() == [0, 1]
    assert len(opened.train.objects[2]) == 0
    assert [len(one) for one in opened.train.objects] == [1, 2, 0]
    assert len(opened.train.objects[-2]) == 2
    with Image.open(tmp_path / "images" / "train" / "1.png") as picture:
        assert opened.train.image(1)[:, 4, 3].tolist() == list(picture.getpixel((3, 4)))
    assert opened.skipped == ()


def test_a_polygon_counts_as_its_enclosing_box(tmp_path: Path) -> None:
    file = yolo_set(tmp_path)
    label(tmp_path, "train", 0, "0 0.5 0.1 0.25 0.9 0.75 0.3\n1 0 0 0.5 0 0.5 0.5 0 0.5\n")
    found = YoloFiles(str(file)).open(NOWHERE).train
    assert boxes(found)[1] == [0, 0, 20, 15]
    assert boxes(found)[0] == pytest.approx([10, 3, 30, 27])


def test_without_val_every_tenth_is_held_out(tmp_path: Path) -> None:
    opened = YoloFiles(str(yolo_set(tmp_path, count=20, val=None))).open(NOWHERE)
    ordered = sorted(f"images/train/{i}.png" for i in range(20))
    assert list(opened.valid.names) == ordered[9::10]
    assert sorted([*opened.train.names, *opened.valid.names]) == ordered


@pytest.mark.parametrize("key", ["val", "valid", "validation"])
def test_the_part_for_validation_has_three_names(key: str, tmp_path: Path) -> None:
    described = {"val": None, key: "images/val"}
    opened = YoloFiles(str(yolo_set(tmp_path, **described))).open(NOWHERE)
    assert list(opened.valid.names) == ["images/val/0.png"]


def test_lists_folders_and_roots_are_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    yolo_set(tmp_path / "set", count=2)
    picture(tmp_path / "set" / "more" / "images" / "deep" / "x.png")
    labels = tmp_path / "set" / "more" / "labels" / "deep" / "x.txt"
    labels.parent.mkdir(parents=True)
    labels.write_text(ONE_BOX)
    (tmp_path / "set" / "val.txt").write_text("./images/val/0.png\n\nimages/train/1.png\n")
    file = tmp_path / "conf" / "data.yml"
    file.parent.mkdir()
    file.write_text(
        "path: ../set\ntrain: [images/train, more/images]\nval: ../val.txt\nnames: [cat, 2]\n",
        encoding="utf-8",
    )
    opened = LabelledFiles(str(file)).open(NOWHERE)
    assert [Path(name).name for name in opened.train.names] == ["0.png", "1.png", "x.png"]
    assert [Path(name).parent.name for name in opened.valid.names] == ["train", "val"]
    assert list(opened.classes) == ["cat", "2"]
    assert f"{file}: val: 1 of its pictures are in train too, so metrics are of what" in caplog.text


def test_coco_reads_in_the_order_of_ids(tmp_path: Path) -> None:
    def change(content: dict[str, list[dict[str, object]]]) -> None:
        content["annotations"][0] |= {"category_id": 3, "iscrowd": 1, "segmentation": {"counts": "x"}}
        content["annotations"].append({"id": 1, "image_id": 1, "category_id": 7, "bbox": [-0.6, 0, 41, 31]})

    opened = LabelledFiles(str(coco_set(tmp_path, change))).open(NOWHERE)
    assert list(opened.classes) == ["cat", "dog"]
    assert boxes(opened.train) == [[15, 7.5, 25, 22.5], [0, 0, WIDTH, HEIGHT]]
    assert opened.train.objects[0].labels.tolist() == [0, 1]
    assert opened.train.objects[0].crowd.tolist() == [True, False]
    assert len(opened.train) == len(opened.valid) == 3
    assert opened.train.image(0).shape == (3, HEIGHT, WIDTH)


@pytest.mark.parametrize(
    ("json_file", "images"),
    [
        ("train/_annotations.coco.json", "train"),
        ("instances_train2017.json", "."),
        ("instances_train2017.json", "images"),
        ("annotations/instances_train2017.json", "train2017"),
        ("annotations/instances_train2017.json", "images/train2017"),
        ("annotations/train.json", "annotations/train"),
        ("annotations/train.json", "images"),
    ],
)
def test_coco_finds_images_and_holds_out(json_file: str, images: str, tmp_path: Path) -> None:
    for i in range(1, 21):
        picture(tmp_path / images / f"{i}.png", seed=i)
    file = tmp_path / json_file
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(coco_content(20)))
    opened = CocoFiles(str(file)).open(NOWHERE)
    ordered = sorted(f"{i}.png" for i in range(1, 21))
    assert list(opened.valid.names) == ordered[9::10]
    assert (len(opened.train), len(opened.valid)) == (18, 2)


@pytest.mark.parametrize(
    ("train", "valid", "named"),
    [
        ("train/_annotations.coco.json", "valid/_annotations.coco.json", False),
        ("train/_annotations.coco.json", "test/_annotations.coco.json", False),
        ("a/instances_train2017.json", "a/instances_val2017.json", False),
        ("a/one.json", "b/two.json", True),
    ],
)
def test_coco_finds_its_part_for_validation(train: str, valid: str, named: bool, tmp_path: Path) -> None:
    for name, count in ((train, 3), (valid, 2)):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(coco_content(count)))
        for i in range(1, count + 1):
            picture(file.parent / f"{i}.png", seed=i)
    opened = CocoFiles(str(tmp_path / train), str(tmp_path / valid) if named else None).open(NOWHERE)
    assert (len(opened.train), len(opened.valid)) == (3, 2)


@pytest.mark.parametrize("name", ["a\0.png", "\ud800.png", "é" * 200])
def test_a_name_that_no_file_can_have_is_a_problem_of_that_entry(name: str, tmp_path: Path) -> None:
    for part in ("train", "val"):
        content = coco_content(2)
        content["images"][1]["file_name"] = name if part == "train" else "2.png"
        (tmp_path / f"{part}.json").write_text(json.dumps(content))
    for i in (1, 2):
        picture(tmp_path / f"{i}.png", seed=i)
    with pytest.raises(UserError, match=r"train\.json"):
        CocoFiles(str(tmp_path / "train.json")).open(NOWHERE)


@pytest.mark.parametrize("year", [2007, 2012])
def test_voc_counts_from_one_and_difficult_is_crowd(year: int, tmp_path: Path) -> None:
    voc_set(tmp_path, year)
    opened = VocFiles(year=year).open(tmp_path)  # type: ignore[arg-type]
    assert list(opened.classes) == list(CLASSES)
    assert len(set(CLASSES)) == 20
    assert (len(opened.train), len(opened.valid)) == (2, 1)
    assert list(opened.train.names) == ["JPEGImages/train_0.jpg", "JPEGImages/train_1.jpg"]
    found = opened.train.objects[0]
    assert found.boxes.tolist() == [[0, 0, 20, 30], [10, 5, 40, 10]]
    assert [CLASSES[label] for label in found.labels.tolist()] == ["dog", "cat"]
    assert found.crowd.tolist() == [False, True]


@pytest.mark.parametrize("ending", [".jpg", ".png", ".webp", ".tiff"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_turned_picture_is_as_it_is_seen(ending: str, orientation: int, tmp_path: Path) -> None:
    file = yolo_set(tmp_path)
    (tmp_path / "images" / "train" / "0.png").unlink()
    picture(tmp_path / "images" / "train" / f"0{ending}", orientation=orientation)
    scenes = YoloFiles(str(file)).open(NOWHERE).train
    height, width = (WIDTH, HEIGHT) if orientation in (6, 8) else (HEIGHT, WIDTH)
    assert scenes.sizes[0].tolist() == [height, width]
    assert boxes(scenes) == [[0.375 * width, 0.25 * height, 0.625 * width, 0.75 * height]]
    with Image.open(picture(tmp_path / f"stored{ending}")) as stored:
        first = stored.convert("RGB").getpixel((0, 0))
    corner = {1: (0, 0), 3: (-1, -1), 6: (0, -1), 8: (-1, 0)}[orientation]
    assert scenes.image(0)[:, *corner].tolist() == list(first)


def test_an_orientation_after_a_pngs_pixels_counts(tmp_path: Path) -> None:
    file = yolo_set(tmp_path)
    plain = (tmp_path / "images" / "train" / "0.png").read_bytes()
    tagged = picture(tmp_path / "tagged.png", orientation=6).read_bytes()
    start = tagged.index(b"eXIf") - 4
    chunk = tagged[start : start + 12 + int.from_bytes(tagged[start : start + 4], "big")]
    (tmp_path / "images" / "train" / "0.png").write_bytes(plain[:-12] + chunk + plain[-12:])
    scenes = YoloFiles(str(file)).open(NOWHERE).train
    assert scenes.sizes[0].tolist() == [WIDTH, HEIGHT]
    assert scenes.image(0).shape == (3, WIDTH, HEIGHT)


def test_bytes_after_a_jpeg_are_no_damage(tmp_path: Path) -> None:
    file = yolo_set(tmp_path, ending=".jpg")
    with (tmp_path / "images" / "train" / "0.jpg").open("ab") as data:
        data.write(b"\0" * 100)
    assert len(YoloFiles(str(file)).open(NOWHERE).train) == 3


def test_a_set_of_many_pictures_is_few_tensors(tmp_path: Path) -> None:
    scenes = YoloFiles(str(yolo_set(tmp_path, count=30))).open(NOWHERE).train
    assert isinstance(scenes, FileScenes)
    assert pickle.dumps(scenes).count(b"_rebuild_tensor") <= 4
    copy = pickle.loads(pickle.dumps(scenes))
    assert boxes(copy, 29) == boxes(scenes, 29)
    assert math.prod(copy.image(29).shape) == 3 * HEIGHT * WIDTH


def test_sixteen_bits_of_grey_are_scaled_and_not_cut_off(tmp_path: Path) -> None:
    grey = np.arange(256, dtype=np.uint16).reshape(16, 16)
    for ending in ("png", "tif"):
        Image.fromarray(grey * 257).save(tmp_path / f"a.{ending}")
        picture = FileScenes([(probe(tmp_path / f"a.{ending}"), "a", [])]).image(0)
        assert picture.tolist() == [grey.tolist()] * 3
    Image.fromarray(grey.astype(np.float32)).save(tmp_path / "float.tif")
    with pytest.raises(UserError, match=r"float.tif: has 32 bits a pixel"):
        probe(tmp_path / "float.tif")
