"""Small detectors on a few drawn scenes."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from ddptrain.data.detection.augment import DetectionAugment
from ddptrain.data.detection.data import DetectionData
from ddptrain.data.detection.drawn import DrawnScenes
from ddptrain.data.detection.source import ArrayScenes, DetectionSet, DetectionSource, Objects
from ddptrain.recipes.detection.detector import Detector
from ddptrain.recipes.detection.library import LibraryDetection
from ddptrain.recipes.yolo.assign import TaskAligned
from ddptrain.recipes.yolo.detection import Detection
from ddptrain.recipes.yolo.model import Yolo

SAMPLES = 20


def detector(
    batchnorm: bool = True, multi_scale: float = 0.0, one_to_one: bool = False
) -> tuple[Detection, DetectionData]:
    data = DetectionData(DrawnScenes(train=SAMPLES, valid=13, size=64), DetectionAugment())

    def model(num_classes: int) -> nn.Module:
        network = Yolo(num_classes, one_to_one=one_to_one)
        return network if batchnorm else without_batchnorm(network)

    return Detection(model, data, TaskAligned(), multi_scale=multi_scale), data


def without_batchnorm(network: nn.Module) -> nn.Module:
    """The network with a norm that looks at one sample only, so that it can't tell how a batch is cut."""
    for name, child in network.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(network, name, nn.GroupNorm(1, child.num_features))
        else:
            without_batchnorm(child)
    return network


def library_detector(
    model: Callable[[int, int], Detector], masks: bool = False
) -> tuple[LibraryDetection, DetectionData]:
    """model: called with the number of classes and the pictures' side."""
    data = DetectionData(DrawnScenes(train=SAMPLES, valid=13, size=64, masks=masks), DetectionAugment())
    return LibraryDetection(lambda num_classes, size: model(num_classes, size), data), data


def with_statistics(detector: Detector) -> Detector:
    """With frozen norms that are not new, so that a picture's numbers do not depend on the batch."""
    draw = torch.Generator().manual_seed(1)
    for module in detector.modules():
        if isinstance(module, FrozenBatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1, generator=draw)
            module.running_var.uniform_(5, 10, generator=draw)
    return detector


class Oblong(DetectionSource):
    """Noise, higher or wider than a square; a crowd on one, nothing on another."""

    def __init__(self, height: int, width: int) -> None:
        self._size, self.name = (height, width), "test"

    def open(self, root: Path) -> DetectionSet:
        generator = torch.Generator().manual_seed(1)
        parts = []
        for n in (10, 4):
            images = torch.randint(256, (n, 3, *self._size), generator=generator).to(torch.uint8)
            most = torch.tensor(self._size[::-1]) / 2
            objects = []
            for k in range(n):
                corner, size = (torch.rand(k % 4, 2, generator=generator) * most for _ in range(2))
                labels, crowd = torch.arange(k % 4) % 2, torch.arange(k % 4) == k - 3
                objects.append(Objects(torch.cat([corner, corner + size + 1], dim=1), labels, crowd))
            parts.append(ArrayScenes(images, objects, [str(i) for i in range(n)]))
        return DetectionSet(parts[0], parts[1], ("a", "b"))
