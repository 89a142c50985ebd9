"""Pictures of one's own with Pascal VOC's XML: found as the tools that write it leave them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from labelled import HEIGHT, VOC_XML, WIDTH, coco_set, label, picture, refusal, truncate, voc_folder, yolo_set

from ddptrain.data.detection.anyfiles import LabelledFiles
from ddptrain.data.detection.source import DetectionSet
from ddptrain.data.detection.voc_folder import VocFolder
from ddptrain.data.detection.yolo import YoloFiles
from ddptrain.errors import UserError

NOWHERE = Path("nowhere")
NO_OBJECT = "<annotation><filename>a.png</filename></annotation>"


def opened(folder: Path) -> DetectionSet:
    return LabelledFiles(str(folder)).open(NOWHERE)


def names(found: DetectionSet) -> tuple[list[str], list[str]]:
    return list(found.train.names), list(found.valid.names)


def move(folder: Path, pattern: str, to: str) -> None:
    (folder / to).mkdir(parents=True, exist_ok=True)
    for file in folder.glob(pattern):
        file.rename(folder / to / file.name)


def test_beside_the_pictures_in_train_and_valid(tmp_path: Path) -> None:
    (voc_folder(tmp_path) / "README.dataset.txt").write_text("of Roboflow")
    found = opened(tmp_path)
    assert list(found.classes) == ["cat", "dog"]
    assert names(found) == ([f"train/{i}.png" for i in range(3)], ["valid/0.png"])
    on_it = found.train.objects[0]
    assert on_it.boxes.tolist() == [[0, 0, 20, 30], [10, 5, 40, 10]]
    assert on_it.labels.tolist() == [1, 0]
    assert on_it.crowd.tolist() == [False, True]
    assert found.train.image(1).shape == (3, HEIGHT, WIDTH)


@pytest.mark.parametrize("part", ["val", "valid", "validation", "test"])
def test_the_part_for_validation_has_one_of_its_usual_names(part: str, tmp_path: Path) -> None:
    (voc_folder(tmp_path) / "valid").rename(tmp_path / part)
    assert names(opened(tmp_path))[1] == [f"{part}/0.png"]


@pytest.mark.parametrize(
    ("pictures", "annotations"),
    [("JPEGImages", "Annotations"), ("images", "annotations"), ("images", "Annotations"), (".", ".")],
)
def test_one_folder_of_which_every_tenth_is_held_out(pictures: str, annotations: str, tmp_path: Path) -> None:
    voc_folder(tmp_path, count=20)
    move(tmp_path, "train/*.png", pictures)
    move(tmp_path, "train/*.xml", annotations)
    for left in ("train", "valid"):
        for file in (tmp_path / left).iterdir():
            file.unlink()
        (tmp_path / left).rmdir()
    in_order = sorted((Path(pictures) / f"{i}.png").as_posix() for i in range(20))
    assert names(opened(tmp_path)) == (in_order[:9] + in_order[10:19], in_order[9::10])


def test_parts_within_the_folder_of_pictures(tmp_path: Path) -> None:
    voc_folder(tmp_path / "images")
    for part in ("train", "valid"):
        move(tmp_path, f"images/{part}/*.xml", f"annotations/{part}")
    for place in (tmp_path, tmp_path / "images"):
        assert (len(opened(place).train), len(opened(place).valid)) == (3, 1)


@pytest.mark.parametrize("valid", ["val", "Validation", "test"])
def test_the_lists_of_vocs_own_layout(valid: str, tmp_path: Path) -> None:
    voc_folder(tmp_path)
    move(tmp_path, "train/*.png", "JPEGImages")
    move(tmp_path, "train/*.xml", "Annotations")
    (tmp_path / "train").rmdir()
    lists = tmp_path / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    picture(tmp_path / "JPEGImages" / "my cat.png")
    (tmp_path / "Annotations" / "my cat.XML").write_text(VOC_XML)
    picture(tmp_path / "SegmentationClass" / "0.png")
    (lists / "Train.txt").write_text('2\r\n0.png\r\n"my cat"\r\n2\r\n')
    (lists / f"{valid}.txt").write_text("1\n")
    found = opened(tmp_path)
    three = [f"JPEGImages/{name}.png" for name in ("0", "2", "my cat")]
    assert names(found) == (three, ["JPEGImages/1.png"])
    (lists / f"{valid}.txt").write_text("1\n\n7\n")
    message = refusal(LabelledFiles(str(tmp_path)))
    assert f"{lists}/{valid}.txt, line 3: 7: there is no picture of this name" in message
    assert len(LabelledFiles(str(tmp_path), on_error="skip").open(NOWHERE).valid) == 1
    (lists / f"{valid}.txt").unlink()
    with pytest.raises(UserError, match=r"no picture is left for validation\. Without a part"):
        opened(tmp_path)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_it_reads_what_yolo_reads(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """The same boxes in both layouts."""
    folder = tmp_path_factory.mktemp("both")
    yolo, xml = yolo_set(folder / "yolo"), voc_folder(folder / "xml")
    for part, of_xml, count in (("train", "train", 3), ("val", "valid", 1)):
        for i in range(count):
            corners = st.tuples(st.integers(0, WIDTH - 2), st.integers(0, HEIGHT - 2))
            drawn = data.draw(st.lists(st.tuples(corners, st.sampled_from(["cat", "dog"])), max_size=4))
            lines, objects = "", ""
            for (x, y), name in [((0, 0), "cat"), ((0, 0), "dog"), *drawn]:
                lines += f"{['cat', 'dog'].index(name)} {(x + 1) / WIDTH} {(y + 1) / HEIGHT}"
                lines += f" {2 / WIDTH} {2 / HEIGHT}\n"
                corner = f"<xmin>{x + 1}</xmin><ymin>{y + 1}</ymin><xmax>{x + 2}</xmax><ymax>{y + 2}</ymax>"
                objects += f"<object><name>{name}</name><bndbox>{corner}</bndbox></object>"
            label(folder / "yolo", part, i, lines)
            (folder / "xml" / of_xml / f"{i}.xml").write_text(f"<annotation>{objects}</annotation>")
    ours, theirs = VocFolder(str(xml)).open(NOWHERE), YoloFiles(str(yolo)).open(NOWHERE)
    assert list(ours.classes) == list(theirs.classes)
    for now, other in ((ours.train, theirs.train), (ours.valid, theirs.valid)):
        assert torch.equal(now.sizes, other.sizes)
        for i in range(len(other)):
            assert torch.equal(now.objects[i].labels, other.objects[i].labels)
            torch.testing.assert_close(now.objects[i].boxes, other.objects[i].boxes, atol=1e-4, rtol=0)


def rewrite(before: str, after: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "train" / "1.xml").write_text(VOC_XML.replace(before, after))


@pytest.mark.parametrize(
    ("change", "told", "left"),
    [
        (rewrite("<name>cat</name>", ""), "1.xml, object 2: name None: must be the name", [2, 1, 2]),
        (rewrite("<name>cat</name>", "<name> </name>"), "1.xml, object 2: name : must be", [2, 1, 2]),
        (rewrite("<name>cat<", "<name>cat</name><name>b<"), "name ['cat', 'b']: must be", [2, 1, 2]),
        (rewrite("<annotation>", '<?xml version="1.0" encoding="gbk"?><annotation>'), "as UTF-8", [2, 2]),
        (rewrite("annotation>", "sheet>"), "1.xml: must hold one <annotation>.", [2, 2]),
        (rewrite("<xmax>40<", "<xmax>42<"), "1.xml, object 2: bndbox 11 6 42 10: leaves", [2, 1, 2]),
        (rewrite("<difficult>1<", "<difficult>yes<"), "object 2: difficult yes: must be 0", [2, 1, 2]),
        (rewrite("</annotation>", ""), "1.xml, line 11, column 1: is not XML", [2, 2]),
        (rewrite("<width>40<", "<width>41<"), "1.png: is 40x30 pixels; its labels say 41x30.", [2, 2]),
        (lambda folder: (folder / "train/1.xml").unlink(), "1.png: has no annotation, ", [2, 2]),
        (lambda folder: truncate(folder / "train/1.png"), "1.png: can't be read as an image", [2, 2]),
        (lambda folder: (folder / "train/1.png").unlink(), "1.xml: there is no picture for this", [2, 2]),
    ],
)
def test_a_mistake_is_told_and_left_out(
    change: Callable[[Path], object], told: str, left: list[int], tmp_path: Path
) -> None:
    change(voc_folder(tmp_path))
    message = refusal(LabelledFiles(str(tmp_path)))
    assert message.startswith(f"{tmp_path}: 1 problem in this set:")
    assert told in message
    forgiven = LabelledFiles(str(tmp_path), on_error="skip").open(NOWHERE)
    assert [len(one) for one in forgiven.train.objects] == left
    assert len(forgiven.skipped) == 1
    assert len(LabelledFiles(str(tmp_path)).forgiving().open(NOWHERE).skipped) == 1


@pytest.mark.parametrize("text", [NO_OBJECT, "<annotation></annotation>", "<annotation/>"])
def test_an_annotation_without_objects_says_that_nothing_is_there(text: str, tmp_path: Path) -> None:
    (voc_folder(tmp_path) / "train" / "0.xml").write_text(text)
    assert [len(one) for one in opened(tmp_path).train.objects] == [0, 2, 2]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<annotation>", '<annotation verified="yes">'),
        ("<width>40</width><height>30</height>", "<width>0</width><height>0</height>"),
        ("<width>40</width>", "<width/>"),
        ("<width>40</width>", "<width>40.0</width>"),
        ("  <size><width>40</width><height>30</height><depth>3</depth></size>\n", ""),
        ("<difficult>0<", "<difficult>Unspecified<"),
        ("<difficult>0</difficult>", ""),
        ("<xmin>1<", "<xmin>1.0<"),
        ("<name>dog<", "<name>\n dog <"),
    ],
)
def test_what_tools_write_otherwise_is_the_same_set(before: str, after: str, tmp_path: Path) -> None:
    expected = opened(voc_folder(tmp_path / "plain")).train.objects[0]
    assert before in VOC_XML
    (voc_folder(tmp_path / "other") / "train" / "0.xml").write_text(VOC_XML.replace(before, after))
    found = opened(tmp_path / "other").train.objects[0]
    for name in ("boxes", "labels", "crowd"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_another_set_takes_the_classes_of_the_model(tmp_path: Path) -> None:
    """A small one need not show each of them."""
    for classes, expected in ((["cat", "dog", "owl"], ["cat", "dog", "owl"]), (["cat"], ["cat", "dog"])):
        source = LabelledFiles(str(voc_folder(tmp_path / classes[-1])))
        source.adopt_classes(classes)
        found = source.open(NOWHERE)
        assert list(found.classes) == expected
        assert [found.classes[label] for label in found.train.objects[0].labels] == ["dog", "cat"]


def test_two_pictures_of_one_annotation(tmp_path: Path) -> None:
    picture(voc_folder(tmp_path) / "train" / "1.jpg")
    assert "1.png: has the same annotation as 1.jpg. Rename" in refusal(LabelledFiles(str(tmp_path)))
    assert len(LabelledFiles(str(tmp_path), on_error="skip").open(NOWHERE).train) == 3


def test_folders_of_other_layouts_are_told(tmp_path: Path) -> None:
    file = yolo_set(tmp_path / "yolo")
    assert f"Did you mean data.source.path={file}?" in refusal(LabelledFiles(str(file.parent)))
    coco_set(tmp_path / "coco")
    message = refusal(LabelledFiles(str(tmp_path / "coco")))
    assert "none of its pictures has an XML file. Did you mean data.source.path=" in message
    assert message.endswith(".json?")
    (tmp_path / "xml").mkdir()
    (tmp_path / "xml" / "a.xml").write_text(VOC_XML)
    assert "xml holds no picture." in refusal(LabelledFiles(str(tmp_path / "xml")))
    picture(tmp_path / "xml" / "a.png")
    (tmp_path / "xml" / "a.xml").write_text(NO_OBJECT)
    assert "no annotation in it names an object" in refusal(LabelledFiles(str(tmp_path / "xml")))
