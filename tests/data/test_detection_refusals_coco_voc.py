"""What is wrong with a set in COCO's or VOC's layout is said with its place, its value and the rule."""

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from labelled import HEIGHT, VOC_XML, WIDTH, coco_set, picture, refusal, truncate, voc_set

from ddptrain.data.detection.coco import CocoFiles
from ddptrain.data.detection.voc import VocFiles
from ddptrain.errors import UserError

NOWHERE = Path("nowhere")
Content = dict[str, Any]


def annotation(**changed: Any) -> Callable[[Content], None]:
    """The second annotation, with these keys changed, or removed where None."""

    def change(content: Content) -> None:
        entry = content["annotations"][1] | changed
        content["annotations"][1] = {key: value for key, value in entry.items() if value is not None}

    return change


def image(**changed: Any) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        entry = content["images"][1] | changed
        content["images"][1] = {key: value for key, value in entry.items() if value is not None}

    return change


@pytest.mark.parametrize(
    ("change", "told", "left"),
    [
        (annotation(image_id=99), ", annotation 12: image_id 99: no image has this id.", [1, 0, 1]),
        (annotation(image_id="2"), ', annotation 12: image_id "2": no image has this id.', [1, 0, 1]),
        (annotation(category_id=1), ", annotation 12: category_id 1: no category has this id.", [1, 0, 1]),
        (annotation(id=11), ", annotation 11: the id must be a number that no other one has.", [1, 0, 1]),
        (annotation(bbox=None), ", annotation 12: has no bbox.", [1, 0, 1]),
        (
            annotation(id=None, image_id=None),
            ", annotation number 2 in its list: has no id and no",
            [1, 0, 1],
        ),
        (annotation(iscrowd=2), ", annotation 12: iscrowd 2: must be 0 or 1.", [1, 0, 1]),
        (annotation(bbox=[1, 2, 3]), ", annotation 12: bbox [1, 2, 3]: must be four numbers", [1, 0, 1]),
        (annotation(bbox=[1, 2, 3, "4"]), 'bbox [1, 2, 3, "4"]: must be four numbers', [1, 0, 1]),
        (annotation(bbox=[1, 2, 3, float("nan")]), "bbox [1, 2, 3, NaN]: must be finite", [1, 0, 1]),
        (annotation(bbox=[1, 2, 0, 4]), ", annotation 12: bbox [1, 2, 0, 4]: has no area", [1, 0, 1]),
        (annotation(bbox=[5, 2, -3, 4]), "bbox [5, 2, -3, 4]: has no area", [1, 0, 1]),
        (annotation(bbox=[35.5, 2, 6, 4]), "bbox [35.5, 2, 6, 4]: leaves the picture of 40x30", [1, 0, 1]),
        (annotation(bbox=[1, -1.1, 6, 4]), "its edges must lie within it (1 pixel beyond", [1, 0, 1]),
        (image(file_name="gone.png"), "train/gone.png: can't be read as an image (No such file", [1, 1]),
        (image(width=30), "2.png: is 40x30 pixels; its labels say 30x30.", [1, 1]),
        (image(height=None), ", image 2: has no height.", [1, 1]),
        (image(file_name=["2.png"]), ", image 2: the id must be a number and file_name,", [1, 1]),
    ],
)
def test_a_bad_entry_of_coco_is_told_and_left_out(
    change: Callable[[Content], None], told: str, left: list[int], tmp_path: Path
) -> None:
    file = coco_set(tmp_path, change)
    message = refusal(CocoFiles(str(file)))
    assert f"{file}, " in message
    assert told in message
    opened = CocoFiles(str(file), on_error="skip").open(NOWHERE)
    assert [len(one) for one in opened.train.objects] == left
    assert opened.skipped
    assert all(f"  {line}\n" in message for line in opened.skipped)


def test_the_first_image_may_be_the_one_that_is_missing(tmp_path: Path) -> None:
    file = coco_set(tmp_path)
    (tmp_path / "train" / "1.png").unlink()
    assert f"{file}, image 1: {tmp_path}/train/1.png: can't be read" in refusal(CocoFiles(str(file)))


def test_ids_of_images_are_their_own(tmp_path: Path) -> None:
    file = coco_set(tmp_path, image(id=1))
    message = refusal(CocoFiles(str(file)))
    assert f"{file}, image 1: 2.png and 1.png have this id" in message
    assert "annotation 12: image_id 2: no image has this id" in message
    assert "2 problems" in message


@pytest.mark.parametrize("name", ["1.png", "./1.png"])
def test_a_picture_is_one_image(tmp_path: Path, name: str) -> None:
    """As two, each would have the other's objects as its background."""
    file = coco_set(tmp_path, image(file_name=name))
    assert f"{file}, image 2: {name} is the picture of image 1 too." in refusal(CocoFiles(str(file)))


def test_pictures_in_both_parts_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = coco_set(tmp_path)
    with caplog.at_level("WARNING", logger="ddptrain"):
        CocoFiles(str(file)).open(NOWHERE)
        assert not caplog.records
        CocoFiles(str(file), str(file)).open(NOWHERE)
    assert "3 of its pictures are in" in caplog.text


def test_class_names_that_unicode_writes_in_two_ways(tmp_path: Path) -> None:
    def change(content: Content) -> None:
        for number, form in enumerate(("NFC", "NFD"), 40):
            content["categories"].append({"id": number, "name": unicodedata.normalize(form, "café")})

    with pytest.raises(UserError, match="in how Unicode writes them alone"):
        CocoFiles(str(coco_set(tmp_path, change))).open(NOWHERE)


def test_labels_of_a_picture_as_it_is_stored_are_told(tmp_path: Path) -> None:
    file = coco_set(tmp_path)
    picture(tmp_path / "train" / "2.png", orientation=6)
    message = refusal(CocoFiles(str(file)))
    assert (
        f"2.png: its EXIF tag turns it to {HEIGHT}x{WIDTH} pixels, but its labels say {WIDTH}x{HEIGHT}"
        in message
    )
    coco_set(tmp_path / "mended", image(width=HEIGHT, height=WIDTH))
    picture(tmp_path / "mended" / "train" / "2.png", orientation=6)
    mended = CocoFiles(str(tmp_path / "mended" / "annotations" / "instances_train.json")).open(NOWHERE)
    assert mended.train.sizes[1].tolist() == [WIDTH, HEIGHT]


def test_a_cut_jpeg_of_coco_is_left_out(tmp_path: Path) -> None:
    file = coco_set(tmp_path, image(file_name="2.jpg"))
    truncate(picture(tmp_path / "train" / "2.jpg"))
    assert f"{file}, image 2: {tmp_path}/train/2.jpg: can't be read" in refusal(CocoFiles(str(file)))
    assert len(CocoFiles(str(file), on_error="skip").open(NOWHERE).train) == 2


def categories(entries: Any) -> Callable[[Content], None]:
    return lambda content: content.update(categories=entries)


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda content: content.pop("images"), "images: must be a list of objects"),
        (lambda content: content.update(annotations={}), "annotations: must be a list of objects"),
        (lambda content: content.update(images=[]), "images: lists no image"),
        (categories([]), "categories: must list one or more"),
        (categories([{"id": "3", "name": "cat"}]), "must have an id, a whole number, and a name"),
        (categories([{"id": 3, "name": "cat"}, {"id": 3, "name": "dog"}]), "id 3 is that of cat and of dog"),
        (categories([{"id": 3, "name": "cat"}, {"id": 4, "name": "cat"}]), "0 and 1 are both called cat"),
        (categories([{"id": 7, "name": "cat"}]), "category 3 is cat, and missing in"),
        (
            lambda content: [one.update(file_name=f"x{one['id']}.png") for one in content["images"]],
            "images: x1.png lies in none of",
        ),
    ],
)
def test_a_json_without_a_set_is_refused(
    change: Callable[[Content], None], told: str, on_error: Any, tmp_path: Path
) -> None:
    file = coco_set(tmp_path, change)
    message = refusal(CocoFiles(str(file), on_error=on_error))
    assert str(file) in message
    assert told in message


def test_what_is_no_json_is_refused_with_its_line(tmp_path: Path) -> None:
    file = coco_set(tmp_path)
    file.write_text('{"images": [],\n "annotations": [}\n')
    assert f"{file}, line 2, column 18: is not JSON" in refusal(CocoFiles(str(file)))
    file.write_text(json.dumps([1]))
    assert "images: must be a list" in refusal(CocoFiles(str(file)))


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (
            "<name>cat<",
            "<name>cow boy<",
            ", object 2: name cow boy: must be one of VOC's 20 classes (aeroplane,",
        ),
        ("<xmin>11<", "<xmin>eleven<", ", object 2: bndbox eleven 6 40 10: must be four numbers"),
        (
            "<xmin>11</xmin>",
            "",
            ", object 2: bndbox None 6 40 10: must be four numbers, xmin, ymin, xmax, ymax.",
        ),
        ("<xmax>40<", "<xmax>42<", ", object 2: bndbox 11 6 42 10: leaves the picture of 40x30 pixels"),
        ("<xmax>40<", "<xmax>9<", ", object 2: bndbox 11 6 9 10: has no area"),
        ("<difficult>1<", "<difficult>2<", ", object 2: difficult 2: must be 0 or 1."),
        ("</annotation>", "", ", line 11, column 1: is not XML (no element found)"),
        ("<width>40<", "<width>41<", "train_1.jpg: is 40x30 pixels; its labels say 41x30."),
        ("<annotation>", '<?xml version="1.0" encoding="gbk"?><annotation>', "Save it as UTF-8."),
        ("annotation>", "sheet>", "must hold one <annotation>"),
    ],
)
def test_a_bad_object_of_voc_is_told_and_left_out(before: str, after: str, told: str, tmp_path: Path) -> None:
    file = voc_set(tmp_path) / "train_1.xml"
    file.write_text(VOC_XML.replace(before, after))
    message = refusal(VocFiles(), tmp_path)
    assert "train_1" in message
    assert told in message
    opened = VocFiles(on_error="skip").open(tmp_path)
    assert [len(one) for one in opened.train.objects] == ([2, 1] if "object 2" in told else [2])
    assert len(opened.skipped) == 1


def test_missing_files_of_voc_are_named(tmp_path: Path) -> None:
    annotations = voc_set(tmp_path)
    (annotations / "train_0.xml").unlink()
    (annotations.parent / "JPEGImages" / "train_1.jpg").unlink()
    message = refusal(VocFiles(), tmp_path)
    assert f"{annotations}/train_0.xml: can't be read (No such file" in message
    assert "train_1.jpg: can't be read as an image (No such file" in message


@pytest.mark.parametrize("year", [2011, 2012])
def test_a_missing_set_says_where_to_put_it(year: Any, tmp_path: Path) -> None:
    below = "TrainVal/VOCdevkit/VOC2011" if year == 2011 else "VOCdevkit/VOC2012"
    message = refusal(VocFiles(year), tmp_path)
    assert f"data.root={tmp_path}: holds no VOC{year}: {tmp_path}/{below}/ImageSets/Main/train.txt" in message
    assert "data.source.download=true" in message
    voc_set(tmp_path, year=2010, parts={"train": 2})
    assert "Main/val.txt is missing" in refusal(VocFiles(2010), tmp_path)
