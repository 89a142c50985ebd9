"""All that a detector of torchvision says of a picture, of fixed number, as an export needs it."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torchvision.models.detection.fcos import FCOS
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.retinanet import RetinaNet
from torchvision.ops import clip_boxes_to_image, roi_align
from torchvision.ops.poolers import LevelMapper

from ddptrain.recipes.detection.detections import chosen


def one_stage(detector: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """FCOS, RetinaNet, SSD: (n, a, 4) boxes in pixels, (n, a, classes) scores without the background."""
    inner = _normalised(detector, images)
    levels = list(detector.backbone(inner).values())
    outputs = detector.head(levels)
    [anchors] = detector.anchor_generator(ImageList(inner[:1], [_size(inner)]), levels)
    boxes = torch.stack([_decoded(detector, of, anchors) for of in outputs["bbox_regression"]])
    logits = outputs["cls_logits"].float()
    if isinstance(detector, FCOS):
        scores = (logits.sigmoid() * outputs["bbox_ctrness"].float().sigmoid()).sqrt()
    else:
        scores = logits.sigmoid() if isinstance(detector, RetinaNet) else logits.softmax(-1)
    scale = images.shape[-1] / inner.shape[-1]
    return clip_boxes_to_image(boxes, _size(inner)) * scale, scores[..., 1:]


def two_stages(detector: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """Faster R-CNN: (n, a, classes, 4) boxes in pixels, (n, a, classes) scores."""
    inner = _normalised(detector, images)
    features = detector.backbone(inner)
    of_pictures = [
        _of_boxes(detector, {name: of[i : i + 1] for name, of in features.items()}, inner[i : i + 1])
        for i in range(len(images))
    ]
    boxes, scores = (torch.stack(of) for of in zip(*of_pictures, strict=True))
    return boxes, scores


def _normalised(detector: Any, images: Tensor) -> Tensor:
    """As the detector's own transform does it, of squares."""
    transform = detector.transform
    mean, std = (images.new_tensor(of)[:, None, None] for of in (transform.image_mean, transform.image_std))
    normalised = (images - mean) / std
    if transform.fixed_size is None:
        return normalised
    width, height = transform.fixed_size
    return functional.interpolate(normalised, size=(height, width), mode="bilinear", align_corners=False)


def _size(images: Tensor) -> tuple[int, int]:
    return images.shape[-2], images.shape[-1]


def _decoded(detector: Any, codes: Tensor, anchors: Tensor) -> Tensor:
    decode = detector.box_coder.decode if isinstance(detector, FCOS) else detector.box_coder.decode_single
    boxes: Tensor = decode(codes.float(), anchors)
    return boxes


def _of_boxes(detector: Any, features: Mapping[str, Tensor], image: Tensor) -> tuple[Tensor, Tensor]:
    """One picture's boxes (a, classes, 4) and scores (a, classes)."""
    proposals, known = _proposals(detector, list(features.values()), image)
    heads = detector.roi_heads
    pooled = _pooled(heads.box_roi_pool, features, proposals, image.shape[-1])
    logits, codes = heads.box_predictor(heads.box_head(pooled))
    boxes = heads.box_coder.decode(codes, [proposals])  # (a, classes + 1, 4)
    scores = logits.float().softmax(-1)[:, 1:] * known[:, None]
    return clip_boxes_to_image(boxes[:, 1:], _size(image)), scores


def _proposals(detector: Any, features: list[Tensor], image: Tensor) -> tuple[Tensor, Tensor]:
    """(a, 4) boxes, and 1 for each that is one, 0 for what fills up the number."""
    rpn = detector.rpn
    objectness, codes = rpn.head(features)
    [anchors] = rpn.anchor_generator(ImageList(image, [_size(image)]), features)
    counts = [level[0].numel() for level in objectness]
    boxes, scores, levels = [], [], []
    for number, (of_anchors, logits, code) in enumerate(
        zip(anchors.split(counts), objectness, codes, strict=True)
    ):
        # (1, A, H, W) and (1, 4 A, H, W): in the order of the anchors
        flat = logits[0].permute(1, 2, 0).flatten().float()
        code = code[0].unflatten(0, (-1, 4)).permute(2, 3, 0, 1).flatten(0, 2)
        best, index = flat.topk(min(rpn.pre_nms_top_n(), len(flat)))
        boxes.append(rpn.box_coder.decode_single(code[index], of_anchors[index]))
        scores.append(best.sigmoid())
        levels.append(torch.full_like(index, number))
    box = clip_boxes_to_image(torch.cat(boxes), _size(image))
    sides = box[:, 2:] - box[:, :2]
    score = torch.cat(scores)
    kept = (sides >= rpn.min_size).all(1) & (score >= rpn.score_thresh)
    score = torch.where(kept, score, 0.0)
    best, index = chosen(box, score, torch.cat(levels), rpn.nms_thresh, rpn.post_nms_top_n())
    return box[index], (best > 0).float()


def _pooled(pool: Any, features: Mapping[str, Tensor], boxes: Tensor, side: int) -> Tensor:
    """(a, C, h, w): each box from the level of its size. All are taken from all levels: which ones are on a
    level would be a shape that depends on the picture."""
    levels = [level for name, level in features.items() if name in pool.featmap_names]
    octaves = [round(math.log2(side / level.shape[-1])) for level in levels]
    mapper = LevelMapper(octaves[0], octaves[-1], pool.canonical_scale, pool.canonical_level)
    on_level = mapper([boxes])
    pooled = [
        roi_align(level, [boxes], pool.output_size, 0.5**octave, pool.sampling_ratio)
        * (on_level == number)[:, None, None, None]
        for number, (level, octave) in enumerate(zip(levels, octaves, strict=True))
    ]
    return torch.stack(pooled).sum(0)
