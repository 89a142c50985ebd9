"""A set of one's own, in YOLO's, COCO's or Pascal VOC's layout: by what ``path`` names."""

from collections.abc import Sequence
from pathlib import Path
from typing import final

from ddptrain.data.detection.coco import CocoFiles
from ddptrain.data.detection.files import check_exists, checked_path
from ddptrain.data.detection.source import DetectionSet, DetectionSource
from ddptrain.data.detection.voc_folder import VocFolder
from ddptrain.data.detection.yolo import YoloFiles
from ddptrain.data.left_out import OnError
from ddptrain.errors import UserError

_EXPECTED = (
    "a data.yaml (YOLO's layout), a JSON of instances (COCO's) or a folder of pictures with XML files"
    " (Pascal VOC's)"
)


@final
class LabelledFiles(DetectionSource):
    """What ``path`` names, relative to the current folder: a .yaml or .yml is read by `YoloFiles`, a .json by
    `CocoFiles`, a folder by `VocFolder`, which say where the images and the part for validation are looked
    for.

    on_error: "stop" refuses a set with problems and lists them; "skip" leaves out what they concern. masks:
    read each object's mask, too: YOLO's polygons, COCO's ``segmentation``.
    """

    name = "files"

    def __init__(self, path: str | None = None, on_error: OnError = "stop", masks: bool = False) -> None:
        self._path = checked_path(path, _EXPECTED)
        self._masks = masks
        ending = "" if self._path.is_dir() else self._path.suffix.lower()
        self._source: DetectionSource
        if ending in (".yaml", ".yml"):
            self._source = YoloFiles(path, on_error, masks)
        elif ending == ".json":
            self._source = CocoFiles(path, None, on_error, masks)
        elif masks and self._path.is_dir():
            raise UserError(
                f"data.source.masks=true: {path} is a folder, and Pascal VOC's XML has boxes alone. Name"
                " a data.yaml or a JSON of instances."
            )
        else:
            self._source = VocFolder(str(self._path), on_error)

    def adopt_classes(self, classes: Sequence[str]) -> None:
        self._source.adopt_classes(classes)

    def forgiving(self) -> DetectionSource:
        return LabelledFiles(str(self._path), "skip", self._masks)

    def open(self, root: Path) -> DetectionSet:
        path = self._path
        check_exists(path, _EXPECTED)
        if isinstance(self._source, VocFolder) and not path.is_dir():
            raise UserError(f"data.source.path={path}: must name {_EXPECTED}.")
        return self._source.open(root)
