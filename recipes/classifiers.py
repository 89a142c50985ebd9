"""Any image classifier of torchvision or of timm, by its name."""

from collections.abc import Callable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision import models

from ddptrain.api import UserError

_OF_FILES = {"checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}
"""Arguments of ``timm.create_model`` that name files."""
_MOST_COUNTED = 40
"""Models of a pattern whose parameters are counted; each has to be built, without memory."""


class TorchvisionName(str):
    """The name of a classifier of torchvision."""

    @staticmethod
    def problem(value: str) -> str | None:
        """What is wrong with a value of a config, or None."""
        names = tuple(models.list_models(module=models))
        return problem_of_name(value, names, size_in_torchvision)


class TimmName(str):
    """The name of a classifier of timm."""

    @staticmethod
    def problem(value: str) -> str | None:
        """What is wrong with a value of a config, or None."""
        try:
            import timm
        except ImportError:
            return "needs timm: pip install 'ddptrain[timm]'"
        return problem_of_name(value, tuple(timm.list_models()), _size_in_timm)


def torchvision_classifier(
    name: TorchvisionName,
    num_classes: int,
    in_channels: int,
    image_size: tuple[int, int],
    examples: object = None,
    norm_momentum: float | None = None,
    **arguments: Any,
) -> nn.Module:
    """A classifier of ``torchvision.models``: logits (n, num_classes) for (n, in_channels, H, W).

    norm_momentum: of all BatchNorms, in (0, 1]; None: the model's own. MobileNetV3's 0.01 suits ImageNet's
    long epochs: in the few hundred steps of a small set its statistics never arrive. arguments: the model's
    own (``dropout``, ``stochastic_depth_prob``, ...). examples: not looked at. The weights are random;
    ``init.weights`` brings others.
    """
    height, width = image_size
    if name.startswith("vit_"):
        _square(name, height, width)
        arguments = {"image_size": height, **arguments}
    elif name == "maxvit_t":
        arguments = {"input_size": image_size, **arguments}
    elif name in ("inception_v3", "googlenet"):
        arguments = {"aux_logits": False, "init_weights": False, **arguments}
    model = _build(name, lambda: models.get_model(name, weights=None, num_classes=num_classes, **arguments))
    if in_channels != 3:
        _replace_first_convolution(model, in_channels)
    set_norm_momentum(model, norm_momentum)
    _check_takes(model, name, (in_channels, height, width))
    return model


def timm_classifier(
    name: TimmName,
    num_classes: int,
    in_channels: int,
    image_size: tuple[int, int],
    examples: object = None,
    **arguments: Any,
) -> nn.Module:
    """A classifier of timm: logits (n, num_classes) for (n, in_channels, H, W).

    arguments: of ``timm.create_model`` (``drop_rate``, ``drop_path_rate``, ...). examples: not looked at. The
    weights are random; ``init.weights`` brings others.
    """
    import timm

    for argument in _OF_FILES & arguments.keys():  # some versions of timm unpickle what they name
        raise UserError(f"model.{argument}: is not taken. Start from weights by init.weights=<file>.")
    known = timm.get_pretrained_cfg(name)
    if known is not None and known.fixed_input_size:
        arguments = {"img_size": image_size, **arguments}
    settings = {"num_classes": num_classes, "in_chans": in_channels, **arguments}
    model = _build(name, lambda: timm.create_model(name, pretrained=False, **settings))
    _check_takes(model, name, (in_channels, *image_size))
    return model


def set_norm_momentum(model: nn.Module, momentum: float | None) -> None:
    """Of all BatchNorms; None leaves them as they are. Raises UserError for what is no momentum."""
    if momentum is None:
        return
    if not 0 < momentum <= 1:
        raise UserError(f"model.norm_momentum={momentum}: must be above 0 and at most 1.")
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = momentum


def problem_of_name(value: str, names: tuple[str, ...], size: Callable[[str], int]) -> str | None:
    """What is wrong with a model's name, or None. size: how many parameters the model of a name has."""
    if value in names:
        return None
    if "*" in value and (matching := [name for name in names if fnmatchcase(name, value)]):
        return f"matches {len(matching)}; choose one of them:\n{_counted(matching, size)}"
    if value:
        near = "".join(f" Did you mean {name}?" for name in get_close_matches(value, names, n=1))
        return f"there is no such model.{near} A pattern lists some: model.name=*resnet*"
    return f"which of these {len(names)}? A pattern (*resnet*) says how large they are.\n{', '.join(names)}"


def _counted(names: list[str], size: Callable[[str], int]) -> str:
    """A line for each model, with the millions of its parameters."""
    lines = [f"  {name:40} {size(name) / 1e6:8.1f} M parameters" for name in names[:_MOST_COUNTED]]
    return "\n".join([*lines, *(["  ..."] if len(names) > _MOST_COUNTED else [])])


def size_in_torchvision(name: str) -> int:
    """The parameters of a model of torchvision."""
    return int(next(iter(models.get_model_weights(name))).meta["num_params"])


def _size_in_timm(name: str) -> int:
    import timm

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in timm.create_model(name).parameters())


def _build(name: str, make: Callable[[], Any]) -> nn.Module:
    """What a library builds, or a UserError in place of what it raises for arguments it can't take."""
    try:
        return cast(nn.Module, make())
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise UserError(f"model.name={name}: can't be built so ({error}).") from error


def _check_takes(model: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    """Raise UserError where the model can't take pictures of this shape (C, H, W). Computes with shapes
    only."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {key: value.to("meta") for key, value in held.items()}
    try:
        output = functional_call(model.eval(), state, (torch.empty(1, *shape, device="meta"),))
    except (RuntimeError, AssertionError, ValueError) as error:
        size = f"{shape[1]}x{shape[2]} pixels and {shape[0]} channel(s)"
        raise UserError(f"model.name={name}: can't take pictures of {size} ({error}).") from error
    assert isinstance(output, Tensor)
    model.train()


def _replace_first_convolution(model: nn.Module, in_channels: int) -> None:
    """Give the model a first convolution for other pictures than those in colour."""
    name, first = next((name, part) for name, part in model.named_modules() if isinstance(part, nn.Conv2d))
    parent, _, last = name.rpartition(".")
    own = nn.Conv2d(
        in_channels, first.out_channels, first.kernel_size, first.stride, first.padding,  # type: ignore[arg-type]
        first.dilation, first.groups, first.bias is not None,  # type: ignore[arg-type]
    )  # fmt: skip
    setattr(model.get_submodule(parent), last, own)


def _square(name: str, height: int, width: int) -> None:
    if height != width:
        raise UserError(f"model.name={name}: takes square pictures, not {height}x{width}.")
