"""Small detectors on a few drawn scenes."""

from collections.abc import Callable

import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from ddptrain.data.detection.augment import DetectionAugment
from ddptrain.data.detection.data import DetectionData
from ddptrain.data.detection.drawn import DrawnScenes
from ddptrain.recipes.detection.detector import Detector
from ddptrain.recipes.detection.library import LibraryDetection
from ddptrain.recipes.yolo.assign import TaskAligned
from ddptrain.recipes.yolo.detection import Detection
from ddptrain.recipes.yolo.model import Yolo

SAMPLES = 20


def detector(batchnorm: bool = True, multi_scale: float = 0.0) -> tuple[Detection, DetectionData]:
    data = DetectionData(DrawnScenes(train=SAMPLES, valid=13, size=64), DetectionAugment())

    def model(num_classes: int) -> nn.Module:
        network = Yolo(num_classes)
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


def library_detector(model: Callable[[int, int], Detector]) -> tuple[LibraryDetection, DetectionData]:
    """model: called with the number of classes and the pictures' side."""
    data = DetectionData(DrawnScenes(train=SAMPLES, valid=13, size=64), DetectionAugment())
    return LibraryDetection(lambda num_classes, size: model(num_classes, size), data), data


def with_statistics(detector: Detector) -> Detector:
    """With frozen norms that are not new, so that a picture's numbers do not depend on the batch."""
    draw = torch.Generator().manual_seed(1)
    for module in detector.modules():
        if isinstance(module, FrozenBatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1, generator=draw)
            module.running_var.uniform_(5, 10, generator=draw)
    return detector
