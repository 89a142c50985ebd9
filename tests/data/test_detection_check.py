"""`write ... layout=check`: likely mistakes in labels, each planted one and no others."""

import os
import re
from pathlib import Path

import pytest
import torch
import yaml
from labelled import coco_set, label, picture, truncate, yolo_set
from PIL import Image
from shell import ddptrain
from torchvision.transforms.v2.functional import to_pil_image

from ddptrain.data.detection.check import Mistake, find_mistakes, write_check
from ddptrain.data.detection.coco import CocoFiles
from ddptrain.data.detection.drawn import DrawnScenes
from ddptrain.data.detection.source import DetectionSet
from ddptrain.data.detection.yolo import YoloFiles

SOUND = "0 0.3 0.3 0.25 0.3\n1 0.7 0.7 0.25 0.3\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve different pictures with a cat and a dog each, nothing wrong with them."""
    for part, first in (("train", 0), ("val", 8)):
        for i in range(first, first + (8 if part == "train" else 4)):
            picture(tmp_path / "images" / part / f"{i}.png", seed=i)
            label(tmp_path, part, i, SOUND)
    described = {"train": "images/train", "val": "images/val", "names": ["cat", "dog"]}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(described))
    return tmp_path


def mistakes(folder: Path, size: int = 64) -> list[tuple[str, str]]:
    opened = YoloFiles(str(folder / "data.yaml")).forgiving().open(Path())
    return [(mistake.kind, mistake.line) for mistake in find_mistakes(opened, size)]


def test_nothing_is_found_where_nothing_is_wrong(folder: Path) -> None:
    assert mistakes(folder) == []


def doubled(folder: Path) -> None:
    label(folder, "train", 3, SOUND + "0 0.3 0.3 0.25 0.29\n")


def two_classes(folder: Path) -> None:
    label(folder, "val", 9, SOUND + "0 0.7 0.7 0.25 0.3\n")


def tiny(folder: Path) -> None:
    label(folder, "train", 1, SOUND + "0 0.5 0.9 0.05 0.2\n")


def outside(folder: Path) -> None:
    label(folder, "train", 0, SOUND + "0 0.99 0.5 0.2 0.2\n")


def rare(folder: Path) -> None:
    content = yaml.safe_load((folder / "data.yaml").read_text())
    (folder / "data.yaml").write_text(yaml.safe_dump(content | {"names": ["cat", "dog", "emu"]}))
    label(folder, "train", 5, SOUND + "2 0.5 0.9 0.3 0.2\n")


def copied(folder: Path) -> None:
    (folder / "images/val/9.png").write_bytes((folder / "images/train/2.png").read_bytes())


def compressed(folder: Path) -> None:
    """The same scene, smaller and as a JPEG."""
    drawn = torch.zeros(3, 300, 400, dtype=torch.uint8)
    drawn[0, 40:200, 30:180], drawn[1, 150:280, 200:390], drawn[2, :60, 250:] = 220, 180, 250
    whole = to_pil_image(drawn)
    whole.save(folder / "images/train/6.png")
    whole.resize((320, 240), Image.Resampling.LANCZOS).save(folder / "images/train/7.jpg", quality=70)
    (folder / "images/train/7.png").unlink()


def plain(folder: Path) -> None:
    """Two of one colour that differ by one pixel, and a copy of one of them."""
    for name, value in (("train/6", 91), ("train/7", 90), ("val/8", 91)):
        drawn = torch.full((3, 30, 40), 90, dtype=torch.uint8)
        drawn[0, 0, 0] = value
        to_pil_image(drawn).save(folder / f"images/{name}.png")


def after_a_bad_line(folder: Path) -> None:
    label(folder, "train", 3, "0 0.99 0.5 0.2 0.2\n" + SOUND + "0 0.3 0.3 0.25 0.29\n")


def broken(folder: Path) -> None:
    truncate(folder / "images/train/4.png")


DOUBLES = r"boxes 7 4\.5 17 13\.5 and 7 4\.65 17 13\.35"
DOG = r"23 16\.5 33 25\.5"
PLANTED = {
    doubled: [("doubled", rf"train: images/train/3\.png: {DOUBLES} \(cat\) are one: IoU 0\.97")],
    two_classes: [
        ("doubled", rf"val: images/val/9\.png: boxes {DOG} and {DOG} \(dog and cat\) are one: IoU 1\.00")
    ],
    tiny: [
        (
            "tiny",
            r"train: images/train/1\.png: box 19 24 21 30 \(cat\) is 3\.2 x 9\.6 pixels at data\.size=64",
        )
    ],
    outside: [("left out", r".*labels/train/0\.txt, line 3: box 0\.99 .* leaves the picture of .*")],
    rare: [("classes", "train: emu: 1 object"), ("classes", "val: emu: 0 objects")],
    copied: [("in both parts", r"train: images/train/2\.png = val: images/val/9\.png")],
    compressed: [("twice", r"train: images/train/6\.png = train: images/train/7\.jpg")],
    plain: [("in both parts", r"train: images/train/6\.png = val: images/val/8\.png")],
    after_a_bad_line: [
        ("left out", r".*labels/train/3\.txt, line 1: .*"),
        ("doubled", rf"train: images/train/3\.png: {DOUBLES} \(cat\) are one: IoU 0\.97"),
    ],
    broken: [("left out", r".*images/train/4\.png: .*")],
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_each_mistake_is_found_and_nothing_else(plant: object, folder: Path) -> None:
    plant(folder)  # type: ignore[operator]
    found = mistakes(folder)
    expected = PLANTED[plant]  # type: ignore[index]
    assert [kind for kind, _ in found] == [kind for kind, _ in expected]
    for (_, line), (_, pattern) in zip(found, expected, strict=True):
        assert re.fullmatch(pattern, line), line


def test_names_that_are_no_utf8(folder: Path, tmp_path: Path) -> None:
    for kind, ending in (("images", b"png"), ("labels", b"txt")):
        place = folder / kind / "train"
        (place / f"3.{ending.decode()}").rename(os.fsdecode(os.fsencode(place) + b"/caf\xe9." + ending))
    opened = YoloFiles(str(folder / "data.yaml")).forgiving().open(Path())
    list(write_check(opened, tmp_path / "seen", 1))
    assert r"images/train/caf\udce9.png: box" in (tmp_path / "seen/mistakes.txt").read_text()


def test_sizes_that_a_json_tells_wrongly(tmp_path: Path) -> None:
    def change(content: dict[str, list[dict[str, int]]]) -> None:
        content["images"][1]["width"] = 80

    opened = CocoFiles(str(coco_set(tmp_path, change))).forgiving().open(Path())
    lines = [mistake.line for mistake in find_mistakes(opened, 64) if mistake.kind == "left out"]
    assert len(lines) == 1
    assert "is 40x30 pixels; its labels say 80x30" in lines[0]


def test_drawn_scenes_have_neither_doubles_nor_copies() -> None:
    opened = DrawnScenes(train=150, valid=50, size=96).open(Path())
    kinds = {mistake.kind for mistake in find_mistakes(opened, 96)}
    assert not kinds & {"doubled", "twice", "in both parts", "left out"}


def test_the_page_shows_each_and_escapes_names(folder: Path, tmp_path: Path) -> None:
    for plant in (doubled, tiny, copied, outside):
        plant(folder)
    content = yaml.safe_load((folder / "data.yaml").read_text())
    (folder / "data.yaml").write_text(yaml.safe_dump(content | {"names": ["<b>cat", "dog"]}))
    done = ddptrain(
        folder, "write recipe=yolo_custom data.source.path=data.yaml data.size=64 layout=check out=seen"
    )
    assert done.code == 0, done.err
    page = (folder / "seen/index.html").read_text()
    assert "<b>cat" not in page
    images = re.findall(r'<img src="([^"]+)"', page)
    assert len(images) == 4
    files = [f"pictures/{file.name}" for file in (folder / "seen/pictures").iterdir()]
    assert sorted(files) == sorted(images)
    listed = (folder / "seen/mistakes.txt").read_text().splitlines()
    assert [line.partition(":")[0] for line in listed] == ["left out", "doubled", "tiny", "in both parts"]
    assert re.search(r"1  two boxes on one object", done.out)


def test_what_does_not_fit_on_the_page_is_in_the_text(tmp_path: Path) -> None:
    file = yolo_set(tmp_path / "set", count=2)
    label(tmp_path / "set", "train", 0, "1 0.5 0.5 0.25 0.5\n" * 13)  # 78 pairs
    opened: DetectionSet = YoloFiles(str(file)).open(Path())
    list(write_check(opened, tmp_path / "seen", 64))
    assert (tmp_path / "seen/mistakes.txt").read_text().count("doubled: ") == 78
    assert "and 18 more, in mistakes.txt" in (tmp_path / "seen/index.html").read_text()
    assert isinstance(next(iter(find_mistakes(opened, 64))), Mistake)


def test_copies_are_found_among_hundreds_that_look_alike(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Frames of one camera: of such only the first 200 are compared, but for exact copies."""
    generator = torch.Generator().manual_seed(0)
    for part, ids in (("train", range(204)), ("val", range(300, 303))):
        for i in ids:
            rows = torch.randint(0, 60, (64, 1), generator=generator) + 2 * torch.arange(64)
            file = tmp_path / "images" / part / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rows.to(torch.uint8).numpy()).save(file)
            label(tmp_path, part, i, SOUND)
    (tmp_path / "images/val/302.png").write_bytes((tmp_path / "images/train/99.png").read_bytes())
    described = {"train": "images/train", "val": "images/val", "names": ["cat", "dog"]}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(described))
    (found,) = mistakes(tmp_path)
    assert found[0] == "in both parts"
    assert found[1] == "train: images/train/99.png = val: images/val/302.png"
    assert "207 pictures look so much alike" in caplog.text
