"""From gradients to weights."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

_HOOKS_OF_ALL = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)


class OptimizerStep:
    """An optimizer's step, and the end of the gradients it has used."""

    def __init__(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        self._looks_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
        self._lean = _lean_step(optimizer)
        self._zeroes_as_torch = type(optimizer).zero_grad is Optimizer.zero_grad
        own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
        self._hooks = (*own, *_HOOKS_OF_ALL)

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
        step = self._lean
        if step is None or any(self._hooks) or _profiler_enabled():
            step = self._optimizer.step
        if self._looks_itself:
            self._optimizer.grad_scale, self._optimizer.found_inf = None, nonfinite  # type: ignore[attr-defined]
            step()
        elif not nonfinite:
            step()
        if self._scaler.is_enabled():
            self._scaler.update()  # by what `Precision.unscale` has seen


def _lean_step(optimizer: Optimizer) -> Callable[[], object] | None:
    """The optimizer's step without what torch wraps around it: a range for the profiler, hooks, a schedule's
    counter. They took 29 us of a step of 280 (interleaved). None where others have wrapped it, too."""
    wrapped, own = type(optimizer).step, vars(optimizer).get("step")
    by_torch = getattr(wrapped, "__code__", None) is Optimizer.profile_hook_step(_nothing).__code__
    if not by_torch or not (own is None or hasattr(own, "_wrapped_by_lr_sched")):
        return None
    optimizer._opt_called = True  # type: ignore[attr-defined]  # or the schedule would warn
    return partial(vars(wrapped)["__wrapped__"], optimizer)


def _nothing() -> None: ...
