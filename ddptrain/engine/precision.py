"""Precision: autocast and gradient scaling."""

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ddptrain import torch_private
from ddptrain.distributed.device import has_bf16
from ddptrain.errors import UserError

log = logging.getLogger("ddptrain")
_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


class Precision:
    """Autocast and gradient scaling for one of fp32, tf32, bf16, fp16.

    Weights, gradients and optimizer state stay in the model's own dtype. fp16 has so few exponent
    bits that gradients are scaled up and steps with overflown ones skipped (torch.amp.GradScaler).
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self._device = device
        self._dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")
        if device.type == "cuda":
            torch.backends.cudnn.allow_tf32 = name == "tf32"
            torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
            torch_private.rnns_in_autocasts_dtype()
        elif self._dtype is not None:
            torch_private.lstms_in_what_the_cpu_has()

    def check(self, model: nn.Module) -> None:
        """Raises UserError where this GPU can't compute the model in this precision."""
        if self.name != "bf16" or self._device.type != "cuda" or has_bf16(self._device):
            return
        for name, layer in model.named_modules():
            if isinstance(layer, _CONVOLUTIONS):
                raise UserError(
                    f"precision=bf16: {name} of the model is a convolution, and cuDNN has none in bf16 for"
                    f" {torch.cuda.get_device_name(self._device)} (only from sm_80 on, of 2020)."
                    " Use precision=fp16 or fp32."
                )

    def check_gradients(self, model: nn.Module) -> None:
        """Raises UserError for trained parameters whose gradients torch's scaler can't take."""
        for name, weight in model.named_parameters() if self.scaler.is_enabled() else ():
            if not weight.requires_grad or not (weight.is_complex() or weight.dtype == torch.float16):
                continue
            kept = "real numbers (torch.view_as_real)" if weight.is_complex() else "float32"
            raise UserError(
                f"precision=fp16: {name} of the model is {str(weight.dtype).removeprefix('torch.')}, and the"
                f" gradient scaler of fp16 takes no such gradients. Keep it as {kept}, or use precision=bf16"
                " or fp32."
            )

    def autocast(self) -> AbstractContextManager[Any]:
        """Around the forward pass and the loss."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    def backward(self, loss: Tensor, weight: Tensor, further: tuple[Tensor, Tensor] | None = None) -> None:
        """Add the gradient of ``weight * loss`` (both 0-d) to the parameters' gradients. further: one more
        root and its gradient, taken as it is."""
        gradient = self.scaler.scale(weight) if self.scaler.is_enabled() else weight
        if further is None:
            torch_private.backward((loss,), (gradient,))
        else:
            torch_private.backward((loss, further[0]), (gradient, further[1]))

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo the gradient scaling, for clipping."""
        if self.scaler.is_enabled():
            self.scaler.unscale_(optimizer)


def choose_precision(name: str, device: torch.device) -> Precision:
    """The precision for ``precision=name``; ``auto`` takes bf16 where the GPU computes in it.

    Raises UserError if the device lacks the precision, and warns if it only emulates it.
    """
    on_gpu = device.type == "cuda"
    computes_bf16 = on_gpu and has_bf16(device)
    if name == "auto":
        return Precision("bf16" if computes_bf16 else "fp32", device)
    if name == "tf32" and not computes_bf16:  # both came with the Ampere generation
        raise UserError(
            f"precision=tf32: needs an NVIDIA GPU of 2020 (sm_80) or later; this is {device}."
            " Use precision=fp32, or bf16."
        )
    if name == "bf16" and on_gpu and not computes_bf16:
        log.warning(
            "precision=bf16: %s has no bf16 arithmetic (new in sm_80, in 2020) and emulates it through"
            " fp32, slower than fp32 itself. Use precision=fp16 or fp32",
            torch.cuda.get_device_name(device),
        )
    return Precision(name, device)
