"""Any model of torchvision that gives a class to every pixel, by its name."""

from typing import cast

from torch import nn
from torchvision import models

from ddptrain.api import UserError
from ddptrain.recipes.classifiers import (
    problem_of_name,
    set_norm_momentum,
    size_in_torchvision,
)


class SegmenterName(str):
    """The name of a segmentation model of torchvision."""

    @staticmethod
    def problem(value: str) -> str | None:
        """What is wrong with a value of a config, or None."""
        return problem_of_name(
            value, tuple(models.list_models(module=models.segmentation)), size_in_torchvision
        )


def torchvision_segmenter(
    name: SegmenterName, num_classes: int, aux_loss: bool = False, norm_momentum: float | None = None
) -> nn.Module:
    """A model of ``torchvision.models.segmentation``: for float32 (n, 3, H, W) a dictionary with ``out``,
    logits (n, num_classes, H, W), and with ``aux_loss`` the same from a middle layer, ``aux``.

    norm_momentum: of all BatchNorms, in (0, 1]; None: the model's own, which is 0.01 in MobileNetV3. The
    weights are random; ``init.weights`` brings others.
    """
    if aux_loss and name.startswith("lraspp"):
        raise UserError(f"model.aux_loss=true: {name} has no auxiliary head. Set it to false.")
    # no other arguments: torchvision ignores those that it does not know
    arguments = {"weights": None, "weights_backbone": None, "num_classes": num_classes, "aux_loss": aux_loss}
    model = models.get_model(name, **arguments)
    set_norm_momentum(model, norm_momentum)
    return cast(nn.Module, model)
