"""From gradients to weights."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

_HOOKS_OF_ALL = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)


class Update:
    """An optimizer's step, and the end of the gradients it has used."""

    def __init__(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        self._looks_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
        self._step = _lean_step(optimizer)
        self._trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def forget_gradients(self) -> None:
        for parameter in self._trained:
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


def _lean_step(optimizer: Optimizer) -> Callable[[], object]:
    """The optimizer's step without what torch wraps around it: a range for the profiler, hooks, a schedule's
    counter. They took 29 us of a step of 280 (interleaved); where a hook is registered they stay."""
    wrapped = type(optimizer).step
    inner = getattr(wrapped, "__wrapped__", None)
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, *_HOOKS_OF_ALL)
    if inner is None or not hasattr(wrapped, "hooked") or any(hooks):
        return optimizer.step
    optimizer._opt_called = True  # type: ignore[attr-defined]  # or the schedule would warn
    return partial(inner, optimizer)
