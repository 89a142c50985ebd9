"""A batch of pictures with boxes, and how it is made ready on the device."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ddptrain.data.detection.augment import BoxedImage
from ddptrain.data.detection.letterbox import Letterbox

NOTHING = -1
"""Label of a row that holds no box."""


class Sample(NamedTuple):
    """One picture on its canvas."""

    image: BoxedImage
    colours: Tensor
    """float32 (3, 3): what RGB values are multiplied by."""
    id: int
    placed: Letterbox


class Batch(NamedTuple):
    """n pictures on canvases of one size, with room for k boxes each. Squares, but where an evaluation is
    `DetectionData.rectangular`."""

    images: Tensor
    """float32 (n, 3, H, W) in [0, 1]; uint8 until it is on the device. H, W: multiples of 32."""
    boxes: Tensor
    """float32 (n, k, 4) x1, y1, x2, y2 in pixels of the canvas; zeros below a picture's last box."""
    labels: Tensor
    """int64 (n, k); -1 below a picture's last box."""
    colours: Tensor
    """float32 (n, 3, 3): what the RGB values in [0, 255] are multiplied by, to lie in [0, 1]."""
    ids: Tensor
    """int64 (n,): which pictures of their part of the set."""
    placed: Letterbox
    """Where each picture lies on its canvas; of validation pictures only."""
    masks: Tensor | None = None
    """uint8 (n, k, H, W), of each box's object: 1 where it is seen, zeros below a picture's last box. Of
    training pictures of a set that has masks."""


def stacked(samples: Sequence[Sample]) -> Batch:
    """One batch of uint8 pictures of one size."""
    images, colours, ids, placed = zip(*samples, strict=True)
    most = _room(max(len(image.labels) for image in images))
    boxes = torch.zeros(len(images), most, 4)
    labels = torch.full((len(images), most), NOTHING)
    for i, image in enumerate(images):
        boxes[i, : len(image.labels)] = image.boxes
        labels[i, : len(image.labels)] = image.labels
    pixels = torch.stack([image.pixels for image in images])
    where = Letterbox(*(torch.stack(of) for of in zip(*placed, strict=True)))
    masks = None
    if images[0].masks is not None:
        masks = torch.zeros(len(images), most, *pixels.shape[2:], dtype=torch.uint8)
        for own, image in zip(masks, images, strict=True):
            own[: len(image.labels)] = image.masks
    return Batch(pixels, boxes, labels, torch.stack(colours) / 255, torch.tensor(ids), where, masks)


def _room(boxes: int) -> int:
    """Rows for so many. Of few different numbers: a captured step has a graph for each, and torch's allocator
    keeps blocks of each size."""
    step = 4 if boxes <= 16 else 16
    return -(-boxes // step) * step


def coloured(batch: Batch, channels_last: bool) -> Batch:
    """uint8 pictures -> float32 in [0, 1], their colours changed."""
    pixels = batch.images.flatten(2).to(torch.float32)
    with torch.autocast(pixels.device.type, enabled=False):  # it would round the colours to bf16
        images = torch.bmm(batch.colours, pixels).view(batch.images.shape)
    memory = torch.channels_last if channels_last else torch.contiguous_format
    laid_out = torch.empty_like(images, memory_format=memory)
    return batch._replace(images=torch.clamp(images, 0, 1, out=laid_out))
