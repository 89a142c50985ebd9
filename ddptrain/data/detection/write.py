"""Any opened set, written to disk in YOLO's or COCO's layout."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ddptrain.data.detection.files import FileScenes
from ddptrain.data.detection.run_lengths import area, as_json
from ddptrain.data.detection.source import DetectionSet, Objects, Scenes
from ddptrain.data.pictures import ENDINGS, claim
from ddptrain.text import as_yaml

_LONGEST_NAME = 100


def write_yolo(opened: DetectionSet, folder: Path) -> list[str]:
    """Write the set for `YoloFiles`: ``folder`` gets data.yaml, images/{train,val} and labels/{train,val}.

    Image files are copied as they are, other pictures become PNGs. Returns lines that say what was written.
    Raises UserError where the folder holds something already.
    """
    claim(folder)
    lines, crowds = [], 0
    for part, scenes in (("train", opened.train), ("val", opened.valid)):
        images, labels = folder / "images" / part, folder / "labels" / part
        labels.mkdir(parents=True)
        boxes = 0
        for i, file in enumerate(_write_images(scenes, images)):
            objects, (height, width) = scenes.objects[i], scenes.sizes[i].tolist()
            kept = ~objects.crowd
            rows = zip(objects.labels[kept].tolist(), objects.boxes[kept].tolist(), strict=True)
            text = "".join(f"{label} {in_sides(box, height, width)}\n" for label, box in rows)
            (labels / f"{file.stem}.txt").write_text(text, encoding="utf-8")
            boxes += int(kept.sum())
            crowds += len(objects) - int(kept.sum())
        lines.append(f"{images}: {len(scenes)} pictures with {boxes} boxes")
    described = {"train": "images/train", "val": "images/val", "names": dict(enumerate(opened.classes))}
    file = folder / "data.yaml"
    file.write_text(as_yaml(described), encoding="utf-8")
    if crowds:
        lines.append(f"left out: {crowds} crowd regions, which YOLO's labels can't express")
    return [*lines, f"{file}: {len(opened.classes)} classes"]


def write_coco(opened: DetectionSet, folder: Path) -> list[str]:
    """Write the set for `CocoFiles`: ``folder`` gets train, val and annotations/instances_{train,val}.json.

    Image files are copied as they are, other pictures become PNGs. Returns lines that say what was written.
    Raises UserError where the folder holds something already.
    """
    claim(folder)
    (folder / "annotations").mkdir()
    lines = []
    for part, scenes in (("train", opened.train), ("val", opened.valid)):
        names = [file.name for file in _write_images(scenes, folder / part)]
        content = as_coco(scenes.objects, scenes.sizes, names, opened.classes)
        json_file = folder / "annotations" / f"instances_{part}.json"
        json_file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        lines.append(
            f"{json_file}: {len(names)} pictures in {folder / part}, {len(content['annotations'])} boxes"
        )
    return lines


def as_coco(
    objects: Sequence[Objects], sizes: Tensor, names: Sequence[str], classes: Sequence[str]
) -> dict[str, Any]:
    """COCO's instances JSON for pictures; these, their objects and the classes are numbered from 1.

    objects, names: one for each picture. sizes: int64 (n, 2), height and width.
    """
    annotations: list[dict[str, Any]] = []
    for image, on_it in enumerate(objects, 1):
        masks = [None] * len(on_it) if on_it.masks is None else on_it.masks
        rows = zip(on_it.boxes.tolist(), on_it.labels.tolist(), on_it.crowd.tolist(), masks, strict=True)
        for number, ((x1, y1, x2, y2), label, crowd, mask) in enumerate(rows, len(annotations) + 1):
            entry: dict[str, Any] = {
                "id": number,
                "image_id": image,
                "category_id": label + 1,
                "iscrowd": int(crowd),
            }
            width, height = x2 - x1, y2 - y1
            entry |= {"bbox": [x1, y1, width, height], "area": width * height}
            if mask is not None:
                size = sizes[image - 1].tolist()
                entry |= {"segmentation": as_json(mask, *size), "area": area(mask, *size)}
            annotations.append(entry)
    images = [
        {"id": image, "file_name": name, "height": height, "width": width}
        for image, (name, (height, width)) in enumerate(zip(names, sizes.tolist(), strict=True), 1)
    ]
    categories = [{"id": number, "name": name} for number, name in enumerate(classes, 1)]
    return {"info": {}, "images": images, "annotations": annotations, "categories": categories}


def _write_images(scenes: Scenes, folder: Path) -> Iterator[Path]:
    """Writes one after the other; yields where each lies."""
    from torchvision.transforms.v2.functional import to_pil_image

    folder.mkdir(parents=True)
    taken: set[str] = set()
    for i, name in enumerate(scenes.names):
        original = Path(scenes.files[i]) if isinstance(scenes, FileScenes) else None
        copied = original is not None and original.suffix.lower() in ENDINGS
        file = folder / (_stem(name, i, taken) + (original.suffix.lower() if original and copied else ".png"))
        if original and copied:
            shutil.copyfile(original, file)
        else:
            to_pil_image(scenes.image(i)).save(file)
        yield file


def _stem(name: str, i: int, taken: set[str]) -> str:
    """A name that every file system takes and no picture before it has, whatever its ending."""
    stem = re.sub(r"[^\w.-]+", "_", os.path.splitext(name)[0], flags=re.ASCII)
    stem = stem[-_LONGEST_NAME:].strip("._-") or "picture"
    while stem.lower() in taken:
        stem += f"-{i}"
    taken.add(stem.lower())
    return stem


def in_sides(box: list[float], height: int, width: int) -> str:
    """``cx cy w h`` as shares of the picture's sides; ten digits bring float32 pixels back."""
    x1, y1, x2, y2 = box
    shares = ((x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height)
    return " ".join(f"{share:.10g}" for share in shares)
