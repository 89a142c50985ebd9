"""The masks of detections at the size of their pictures."""

import torch
from torch import Tensor
from torchvision.models.detection.roi_heads import expand_boxes, expand_masks, paste_mask_in_image

from ddptrain.data.detection.run_lengths import encode_masks

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
    wider, scale = expand_masks(masks.cpu().float()[:, None], padding=1)
    places = expand_boxes(boxes.cpu().float(), scale).long()
    # one after the other on one canvas: all of them would take a hundred times a large picture
    canvas = torch.zeros(1, width, height, dtype=torch.uint8).transpose(1, 2)  # in the encoder's order
    whole = []
    for mask, place in zip(wider[:, 0], places, strict=True):
        left, top = place[:2].clamp(min=0).tolist()
        right, bottom = min(int(place[2]) + 1, width), min(int(place[3]) + 1, height)
        if left < right and top < bottom:
            place = place - torch.tensor([left, top, left, top])
            pasted = paste_mask_in_image(mask, place, bottom - top, right - left)
            canvas[0, top:bottom, left:right] = pasted >= _SURE
        whole += encode_masks(canvas)
        canvas[0, top:bottom, left:right] = 0
    return whole
