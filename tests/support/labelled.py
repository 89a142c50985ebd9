"""Small sets of pictures with boxes, as files."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from torchvision.transforms.v2.functional import to_pil_image

from ddptrain.data.detection.source import DetectionSource
from ddptrain.errors import UserError

WIDTH, HEIGHT = 40, 30
ONE_BOX = "1 0.5 0.5 0.25 0.5\n"
"""In pixels: 15, 7.5, 25, 22.5."""


def refusal(source: DetectionSource, root: Path = Path("nowhere")) -> str:
    """What the source says when it refuses to open, on every rank."""
    with pytest.raises(UserError) as caught:
        source.open(root)
    assert caught.value.everywhere
    return str(caught.value)


def truncate(file: Path, share: float = 0.6) -> None:
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])


def picture(path: Path, seed: int = 0, orientation: int | None = None) -> Path:
    """Noise, 40x30."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = torch.randint(256, (3, HEIGHT, WIDTH), generator=torch.Generator().manual_seed(seed))
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    to_pil_image(noise.to(torch.uint8)).save(path, exif=exif)
    return path


def yolo_set(folder: Path, count: int = 3, ending: str = ".png", **changed: Any) -> Path:
    """Two classes; ``count`` pictures with a box each for training, and one for validation. `changed`: keys
    of the data.yaml, None removes one."""
    for part, pictures in (("train", count), ("val", 1)):
        for i in range(pictures):
            picture(folder / "images" / part / f"{i}{ending}", seed=i)
            label(folder, part, i, ONE_BOX)
    described = {"train": "images/train", "val": "images/val", "names": ["cat", "dog"]} | changed
    file = folder / "data.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in described.items() if value is not None}))
    return file


def label(folder: Path, part: str, i: int, text: str) -> Path:
    file = folder / "labels" / part / f"{i}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def coco_content(count: int = 3) -> dict[str, Any]:
    """Two categories, ids 7 (dog) and 3 (cat); ``count`` pictures with a dog each."""
    return {
        "images": [
            {"id": i, "file_name": f"{i}.png", "width": WIDTH, "height": HEIGHT} for i in range(1, count + 1)
        ],
        "annotations": [
            {"id": 10 + i, "image_id": i, "category_id": 7, "bbox": [15, 7.5, 10, 15]}
            for i in range(1, count + 1)
        ],
        "categories": [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}],
    }


def coco_set(folder: Path, change: Callable[[dict[str, Any]], object] = lambda content: None) -> Path:
    """Three pictures for training and three for validation; ``change`` alters the training part's JSON."""
    for part in ("val", "train"):
        content = coco_content()
        for i in range(1, 4):
            picture(folder / part / f"{i}.png", seed=i)
        if part == "train":
            change(content)
        file = folder / "annotations" / f"instances_{part}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content))
    return file


def voc_set(folder: Path, year: int = 2012, parts: Mapping[str, int] = {"train": 2, "val": 1}) -> Path:
    """A dog and, marked as difficult, a cat on every picture. Returns the folder of the annotations."""
    below = folder / "VOCdevkit" / f"VOC{year}"
    for name in ("Annotations", "ImageSets/Main"):
        (below / name).mkdir(parents=True)
    for part, count in parts.items():
        names = [f"{part}_{i}" for i in range(count)]
        (below / "ImageSets" / "Main" / f"{part}.txt").write_text("".join(f"{name}\n" for name in names))
        for i, name in enumerate(names):
            picture(below / "JPEGImages" / f"{name}.jpg", seed=i)
            (below / "Annotations" / f"{name}.xml").write_text(VOC_XML)
    return below / "Annotations"


def voc_folder(folder: Path, count: int = 3) -> Path:
    """A folder of one's own: a dog and, marked as difficult, a cat on each of ``count`` pictures of train and
    one of valid, the annotations beside them."""
    for part, pictures in (("train", count), ("valid", 1)):
        for i in range(pictures):
            picture(folder / part / f"{i}.png", seed=i)
            (folder / part / f"{i}.xml").write_text(VOC_XML)
    return folder


VOC_XML = """<annotation>
  <size><width>40</width><height>30</height><depth>3</depth></size>
  <object><name>dog</name><difficult>0</difficult>
    <bndbox><xmin>1</xmin><ymin>1</ymin><xmax>20</xmax><ymax>30</ymax></bndbox>
    <part><name>head</name><bndbox><xmin>2</xmin><ymin>2</ymin><xmax>3</xmax><ymax>3</ymax></bndbox></part>
  </object>
  <object><name>cat</name><difficult>1</difficult>
    <bndbox><xmin>11</xmin><ymin>6</ymin><xmax>40</xmax><ymax>10</ymax></bndbox>
  </object>
</annotation>
"""
