"""Any detector of torchvision of boxes, or of boxes and masks, by its name, with its own losses and
preprocessing."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import signature
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torchvision import models
from torchvision.models.detection.fcos import FCOS
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNN
from torchvision.models.detection.ssd import SSD
from torchvision.ops import box_iou

from ddptrain.api import UserError
from ddptrain.keys import did_you_mean
from ddptrain.recipes.classifiers import problem_of_name, size_in_torchvision
from ddptrain.recipes.detection.detections import Detections
from ddptrain.recipes.detection.detector import Detector, Losses, Truth
from ddptrain.recipes.detection.norms import freeze_norms
from ddptrain.recipes.detection.torchvision_dense import one_stage, two_stages

Target = dict[str, Tensor]
"""What is on a picture, as torchvision has it."""
_WITHOUT_EPS = ("fasterrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn", "retinanet_resnet50_fpn")
"""Whose weights were trained with norms that divide by the deviation as it is."""
_OF_KEYPOINTS = "keypointrcnn"
"""The family that learns keypoints, too, which the data do not have."""


class DetectorName(str):
    """The name of a detector of torchvision."""

    @staticmethod
    def problem(value: str) -> str | None:
        """What is wrong with a value of a config, or None."""
        if value.startswith(_OF_KEYPOINTS):
            return "learns keypoints, which the data do not have. Take a detector of boxes or masks"
        names = [
            name for name in models.list_models(module=models.detection) if not name.startswith(_OF_KEYPOINTS)
        ]
        return problem_of_name(value, tuple(names), size_in_torchvision)


def torchvision_detector(
    name: DetectorName, num_classes: int, size: int, frozen_norm: bool = False, **arguments: Any
) -> Detector:
    """A detector of ``torchvision.models.detection``.

    size: pixels of the squares that it is given; SSDs scale them to their own. frozen_norm: BatchNorms keep
    the statistics, scales and shifts that ``init.weights`` brings, as is usual where a rank has few pictures.
    arguments: the model's own (``box_score_thresh``, ``box_nms_thresh``, ...). The weights are random.
    """
    for argument in arguments.keys() & {"min_size", "max_size"}:
        raise UserError(f"model.{argument}: data.size says how large pictures are.")
    squares = {} if name.startswith("ssd") else {"min_size": size, "max_size": size}
    try:
        detector = models.get_model(
            name, weights=None, weights_backbone=None, num_classes=num_classes + 1, **squares, **arguments
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"model.name={name}: can't be built so ({error}).") from error
    # torchvision ignores arguments that it does not know
    known = [of.name for of in signature(type(detector)).parameters.values() if of.kind is not of.VAR_KEYWORD]
    for argument in arguments.keys() - {*known}:
        kind = type(detector).__name__
        raise UserError(f"model.{argument}: {kind} has no such argument.{did_you_mean(argument, known)}")
    if frozen_norm:
        freeze_norms(detector, eps=0.0 if name in _WITHOUT_EPS else None)
    return TorchvisionDetector(detector)


@final
class TorchvisionDetector(Detector):
    """One of torchvision's, whose class 0 is the background."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__(detector)
        self.chooses = isinstance(detector, GeneralizedRCNN)
        """Those of two stages do, and only those."""
        self.learns_masks = isinstance(detector, MaskRCNN)
        if self.chooses:
            for part in (cast(Any, detector.rpn), cast(Any, detector.roi_heads)):
                part.box_coder = _ExactBoxCoder(part.box_coder)
        head = cast(Any, detector.roi_heads if self.chooses else detector)
        self.overlap, self.least_score = float(head.nms_thresh), float(head.score_thresh)

    def losses(self, images: Tensor, truths: list[Truth]) -> Iterator[Callable[[], Losses]]:
        """The backbone sees all pictures at once, and so do the heads of a detector of one stage."""
        detector = cast(Any, self.detector)  # torchvision's classes have no common one
        targets = [{"boxes": truth.boxes, "labels": truth.labels + 1} for truth in truths]
        if self.learns_masks:
            for target, truth in zip(targets, truths, strict=True):
                assert truth.masks is not None
                target["masks"] = truth.masks
        batch, targets = detector.transform(list(images), targets)
        features = detector.backbone(batch.tensors)
        of_batch = _losses_of_two_stages if self.chooses else _losses_of_one_stage
        return of_batch(detector, batch, features, targets)

    def detections(self, images: Tensor) -> list[Detections]:
        if self.learns_masks:
            return self._with_masks(images)
        return [_as_detections(answer) for answer in self.detector(list(images))]

    def _with_masks(self, images: Tensor) -> list[Detections]:
        """Without the detector's last step, which would give each mask the size of the whole picture."""
        detector = cast(Any, self.detector)
        batch, _ = detector.transform(list(images))
        features = detector.backbone(batch.tensors)
        proposals, _ = detector.rpn(batch, features)
        answers, _ = detector.roi_heads(features, proposals, batch.image_sizes)
        return [_as_detections(answer) for answer in answers]

    def dense(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return (two_stages if self.chooses else one_stage)(self.detector, images)


def _losses_of_two_stages(
    detector: Any, batch: ImageList, features: Mapping[str, Tensor], targets: list[Target]
) -> Iterator[Callable[[], Losses]]:
    def losses(i: int) -> Losses:
        image = ImageList(batch.tensors[i : i + 1], batch.image_sizes[i : i + 1])
        own = {name: level[i : i + 1] for name, level in features.items()}
        proposals, of_proposals = detector.rpn(image, own, targets[i : i + 1])
        _, of_boxes = detector.roi_heads(own, proposals, image.image_sizes, targets[i : i + 1])
        return {**of_proposals, **of_boxes}

    return (partial(losses, i) for i in range(len(targets)))


def _losses_of_one_stage(
    detector: Any, batch: ImageList, features: Mapping[str, Tensor], targets: list[Target]
) -> Iterator[Callable[[], Losses]]:
    levels = list(features.values())
    # boxes are decoded in the precision that they come in
    outputs = {name: _exact(of) for name, of in detector.head(levels).items()}
    anchors = detector.anchor_generator(batch, levels)

    def losses(i: int) -> Losses:
        own = {name: of[i : i + 1] for name, of in outputs.items()}
        further: list[list[Any]] = []
        if isinstance(detector, FCOS):
            further = [[level.shape[2] * level.shape[3] for level in levels]]
        elif isinstance(detector, SSD):
            further = [[_matched(detector, targets[i]["boxes"], anchors[i])]]
        return cast(Losses, detector.compute_loss(targets[i : i + 1], own, anchors[i : i + 1], *further))

    return (partial(losses, i) for i in range(len(targets)))


def _matched(detector: SSD, boxes: Tensor, anchors: Tensor) -> Tensor:
    """int64 (a,): the box that each anchor learns, or below 0 for none."""
    if not len(boxes):
        return torch.full((len(anchors),), -1, device=anchors.device)
    matched: Tensor = detector.proposal_matcher(box_iou(boxes, anchors))
    return matched


def _as_detections(answer: Mapping[str, Tensor]) -> Detections:
    """torchvision's answer for a picture; its class 0 is the background."""
    masks = answer["masks"][:, 0] if "masks" in answer else None
    whole = Detections(answer["boxes"], answer["scores"], answer["labels"] - 1, masks)
    return whole.where(whole.labels >= 0)


@final
class _ExactBoxCoder:
    """torchvision's coder; proposals, and what is learnt from them, are not rounded to bf16, which would be
    some pixels."""

    def __init__(self, coder: Any) -> None:
        self._coder = coder

    def encode(self, reference_boxes: list[Tensor], proposals: list[Tensor]) -> list[Tensor]:
        codes: list[Tensor] = self._coder.encode(reference_boxes, proposals)
        return codes

    def decode(self, rel_codes: Tensor, boxes: list[Tensor]) -> Tensor:
        decoded: Tensor = self._coder.decode(_exact(rel_codes), boxes)
        return decoded

    def decode_single(self, rel_codes: Tensor, boxes: Tensor) -> Tensor:
        decoded: Tensor = self._coder.decode_single(_exact(rel_codes), boxes)
        return decoded


def _exact(tensor: Tensor) -> Tensor:
    """In float32, if it is of less."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
