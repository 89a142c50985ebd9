"""One call of the optimizer."""

from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddptrain.torch_private import is_fused, is_profiled, lean_step, step_hooks


@final
class OptimizerStep:
    """Calls the optimizer unless a gradient is not finite, and clears gradients."""

    def __init__(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        self._lean = lean_step(optimizer)
        self._hooks = step_hooks(optimizer)
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

    def _step(self) -> None:
        if self._lean is None or any(self._hooks) or is_profiled():
            self._optimizer.step()
        else:
            self._lean()
