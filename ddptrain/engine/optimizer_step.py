"""From gradients to weights."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddptrain.torch_private import LeanStep, is_fused


class OptimizerStep:
    """An optimizer's step, and the end of the gradients it has used."""

    def __init__(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        self._step = LeanStep(optimizer)
        self._looks_itself = is_fused(optimizer)
        self._zeroes_as_torch = type(optimizer).zero_grad is Optimizer.zero_grad

    def forget_gradients(self) -> None:
        """As ``zero_grad`` does, without its range for the profiler."""
        if not self._zeroes_as_torch:
            self._optimizer.zero_grad(set_to_none=True)
            return
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def __call__(self, nonfinite: Tensor) -> None:
        """Step, unless ``nonfinite`` (0-d) is not 0: then nothing moves.

        A fused optimizer looks at it on the device; another one makes the host wait, a sync point.
        """
        if self._looks_itself:
            self._optimizer.grad_scale, self._optimizer.found_inf = None, nonfinite  # type: ignore[attr-defined]
            self._step()
        elif not nonfinite:
            self._step()
        if self._scaler.is_enabled():
            self._scaler.update()  # by what `Precision.unscale` has seen
