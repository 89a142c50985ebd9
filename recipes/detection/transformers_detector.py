"""Any object detector of transformers (RT-DETR, D-FINE, DETR, ...), with its own loss and normalisation."""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.ops import box_convert

from ddptrain.api import UserError
from ddptrain.errors import reason
from ddptrain.keys import did_you_mean
from ddptrain.recipes.detection.detections import Detections, candidates
from ddptrain.recipes.detection.detector import Detector, Losses, Truth
from ddptrain.recipes.detection.norms import freeze_norms

_OF_LOADING = {
    *("trust_remote_code", "cache_dir", "force_download", "local_files_only", "token", "use_auth_token"),
    *("revision", "code_revision", "proxies", "resume_download", "subfolder", "return_unused_kwargs"),
    *("_configuration_file", "_from_auto", "_from_pipeline", "_commit_hash", "user_agent", "auto_map"),
}
"""Of ``AutoConfig.from_pretrained``, beside those of the config."""


def transformers_detector(
    name: str, num_classes: int, size: int, frozen_norm: bool = False, **arguments: Any
) -> Detector:
    """A model of ``AutoModelForObjectDetection``.

    name: of the hub, or a folder with ``config.json`` and ``preprocessor_config.json``. size: pixels of the
    squares that it is given. frozen_norm: as `ddptrain.recipes.detection.torchvision_detector` has it; a
    picture is seen by itself in training, and norms that learn would have its numbers only. arguments: of the
    model's config (``num_queries``, ``num_denoising``, ...). The weights are random.
    """
    try:
        from transformers import AutoConfig, AutoImageProcessor, AutoModelForObjectDetection
    except ImportError as error:
        raise UserError("model: needs transformers: pip install 'ddptrain[transformers]'") from error
    if not name:
        raise UserError("model.name: name a detector of the Hugging Face hub, or a folder.")
    for argument in _OF_LOADING & arguments.keys():  # they would run code, or read and write elsewhere
        raise UserError(f"model.{argument}: is no argument of a model's config. Leave it out.")
    try:
        config, unknown = AutoConfig.from_pretrained(
            name, num_labels=num_classes, return_unused_kwargs=True, trust_remote_code=False, **arguments
        )
        processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
        model = AutoModelForObjectDetection.from_config(config, trust_remote_code=False)
    # not there, another kind of model, a package that it needs, or wrong values
    except (ImportError, OSError, ValueError, TypeError) as error:
        raise UserError(f"model.name={name}: can't be built ({reason(error)}).") from error
    for argument in unknown:
        near = did_you_mean(argument, config.to_dict())
        raise UserError(f"model.{argument}: {type(config).__name__} has no such argument.{near}")
    if frozen_norm:
        freeze_norms(model)
    normalises = bool(processor.do_normalize)
    mean, std = (processor.image_mean, processor.image_std) if normalises else ([0.0] * 3, [1.0] * 3)
    return TransformersDetector(model, num_classes, mean, std)


@final
class TransformersDetector(Detector):
    """One of transformers'. In training it sees a picture at a time: what is drawn for its queries depends on
    the others of a batch. mean, std: of the channels, in [0, 1]."""

    learns_masks = False
    overlap = 1.0
    least_score = 0.0
    chooses = True

    def __init__(self, detector: nn.Module, num_classes: int, mean: list[float], std: list[float]) -> None:
        super().__init__(detector)
        self._num_classes = num_classes
        self.mean = nn.Buffer(torch.tensor(mean)[:, None, None], persistent=False)
        self.std = nn.Buffer(torch.tensor(std)[:, None, None], persistent=False)

    def losses(self, images: Tensor, truths: list[Truth]) -> Iterator[Callable[[], Losses]]:
        inputs = self._normalised(images)
        for i, (boxes, labels, _) in enumerate(truths):
            shares = box_convert(boxes / _sides(images), "xyxy", "cxcywh")
            yield partial(self._loss, inputs[i : i + 1], {"class_labels": labels, "boxes": shares})

    def _loss(self, image: Tensor, target: Mapping[str, Tensor]) -> Losses:
        loss = self.detector(pixel_values=image, labels=[target]).loss
        if not len(target["class_labels"]):
            # nothing to denoise; but ranks wait for a gradient of each parameter
            loss = loss + sum(weight.sum() * 0 for weight in self.parameters() if weight.requires_grad)
        return {"matching": loss}

    def detections(self, images: Tensor) -> list[Detections]:
        boxes, scores = self.dense(images)
        best = candidates(boxes, scores, boxes.shape[1])  # as many as there are queries, as in the papers
        pictures = zip(best.boxes, best.scores, best.labels, strict=True)
        return [Detections(*picture) for picture in pictures]

    def dense(self, images: Tensor) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_exporting():  # its checks of shapes are operators that ONNX lacks
            os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"
        answer = self.detector(pixel_values=self._normalised(images))
        boxes = box_convert(answer.pred_boxes.float(), "cxcywh", "xyxy") * _sides(images)
        logits = answer.logits.float()
        if logits.shape[-1] == self._num_classes:
            return boxes, logits.sigmoid()
        # DETR's: a query is of its likeliest class, or of none, which is the last
        scores = logits.softmax(-1)[..., :-1]
        return boxes, scores * functional.one_hot(scores.argmax(-1), self._num_classes)

    def _normalised(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std


def _sides(images: Tensor) -> Tensor:
    """(4,): width, height, width, height."""
    height, width = images.shape[-2:]
    return images.new_tensor([width, height, width, height])
