"""The masks of detections at the size of their pictures."""

import torch
from torch import Tensor
from torchvision.models.detection.roi_heads import paste_masks_in_image

from ddptrain.data.detection.run_lengths import encoded

_SURE = 0.5
"""From where on a cell is the object's, as torchvision's references have it."""


def whole_masks(masks: Tensor | None, boxes: Tensor, height: int, width: int) -> list[bytes]:
    """Each mask in its picture, as `ddptrain.data.detection.run_lengths` has them; none of a detector without
    masks.

    masks: float (d, 28, 28), each a grid over its box. boxes: (d, 4) in pixels of the picture; they may leave
    it.
    """
    if masks is None:
        return []
    whole = []
    # one at a time: all of them together would be a hundred times a large picture
    for mask, box in zip(masks.cpu().float(), boxes.cpu().float(), strict=True):
        pasted = paste_masks_in_image(mask[None, None], box[None], (height, width))
        whole += encoded((pasted[0] >= _SURE).to(torch.uint8))
    return whole
