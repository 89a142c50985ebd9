"""What `ddptrain.recipes.detection.library.LibraryDetection` trains: a detector with losses of its own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ddptrain.api import UserError, derive_seed
from ddptrain.recipes.detection.detections import Detections
from ddptrain.recipes.detection.norms import check_norms

Losses = Mapping[str, Tensor]
"""0-d, by name."""


class Truth(NamedTuple):
    """What is on a picture."""

    boxes: Tensor
    """float32 (k, 4) x1, y1, x2, y2 in pixels."""
    labels: Tensor
    """int64 (k,)"""
    masks: Tensor | None = None
    """uint8 (k, H, W); None of a set that has none."""


class Detector(nn.Module, ABC):
    """Another library's model, the ``detector``, behind one interface. Its losses are those of each picture
    by itself, and what is drawn for them follows from the picture: they depend neither on the micro-batch nor
    on the rank that a picture is in."""

    overlap: float
    """IoU above which the less sure of two boxes of one class is a double; 1 where it leaves no doubles."""
    least_score: float
    """Its detections have a higher score than this."""
    learns_masks: bool
    """Whether it learns the objects' masks beside their boxes."""
    chooses: bool
    """Whether it chooses queries or proposals by their scores, so that rounding decides on their order."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector
        self._is_checked = False

    def forward(
        self,
        images: Tensor,
        boxes: Tensor | None = None,
        labels: Tensor | None = None,
        ids: Tensor | None = None,
        seed: int = 0,
        masks: Tensor | None = None,
    ) -> Losses | list[Detections]:
        """In training each loss (n,), in evaluation each picture's detections, the surest first.

        images: float32 (n, 3, H, W) in [0, 1]. boxes: (n, k, 4) in pixels. labels: int64 (n, k); -1 where
        there is no box. ids: int64 (n,), of the pictures; with the seed they decide on what is drawn.
        masks: uint8 (n, k, H, W), where the model learns them.
        """
        if isinstance(self, FSDPModule):
            raise UserError(
                "strategy: shards the model, whose parts this detector calls once a picture, so that ranks"
                " would differ in how often they gather them. Use strategy=ddp."
            )
        if not self.training:
            # under bf16 they would round their boxes to some pixels
            with torch.autocast(images.device.type, enabled=False):
                return self.detections(images)
        assert boxes is not None
        assert labels is not None
        assert ids is not None
        if not self._is_checked:
            check_norms(self.detector)
            self._is_checked = True
        there = labels >= 0
        # sync points; such detectors pick out boxes and anchors by masks everywhere
        truths = []
        for i, kept in enumerate(there):
            own = None if masks is None else masks[i][kept]
            truths.append(Truth(boxes[i][kept], labels[i][kept], own))
        seed_device = torch.cuda.manual_seed if images.is_cuda else torch.manual_seed
        losses = []
        for id, picture_losses in zip(ids.tolist(), self.losses(images, truths), strict=True):
            seed_device(derive_seed(seed, id))
            losses.append(picture_losses())
        return {name: torch.stack([of[name] for of in losses]) for name in losses[0]}

    @abstractmethod
    def losses(self, images: Tensor, truths: list[Truth]) -> Iterator[Callable[[], Losses]]:
        """For each picture a function that gives its losses. It is called when the picture's seed is set."""

    @abstractmethod
    def detections(self, images: Tensor) -> list[Detections]:
        """Each picture's, the surest first, in pixels."""

    @abstractmethod
    def dense(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """All answers, of fixed number: boxes (n, a, 4) in pixels, or (n, a, classes, 4) where each class has
        its own, and scores (n, a, classes) in [0, 1]."""
