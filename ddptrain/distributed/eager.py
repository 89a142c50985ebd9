"""A training that compiles nothing does without torch's compiler front end: 0.7 s of importing.

torch (2.11 to 2.15) imports it in any training, only so that no compiled code looks into its optimizers, its
count of FLOPs and DistributedDataParallel. As soon as anything else imports it, all is here as torch has it;
and a torch that names things otherwise imports it as before.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_MARK = "__dynamo_disable"
"""Where torch/_compile.py keeps the form of a function that compiled code does not look into."""
_WRAPPER = "_use_grad"
"""What torch/optim/optimizer.py calls its wrapper of each optimizer's step."""
_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def spare_dynamo() -> None:
    """Keep torch's optimizers from importing torch._dynamo for nothing."""
    for name in _METHODS:
        leave_eager(getattr(Optimizer, name))
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, Optimizer):
            step = vars(kind).get("step")
            if step is not None and step.__code__.co_name == _WRAPPER:
                kind.step = _unbroken(step)  # type: ignore[method-assign]


def leave_eager(wrapper: Callable[..., Any] | None) -> None:
    """The same for a function that torch has wrapped to keep compiled code out of it."""
    function = getattr(wrapper, "__wrapped__", None)
    if wrapper is None or function is None or hasattr(function, _MARK):
        return

    def called(*arguments: Any, **named: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **named)
        if getattr(function, _MARK, None) is called:
            delattr(function, _MARK)
        return wrapper(*arguments, **named)

    setattr(function, _MARK, called)


@contextmanager
def wrapping() -> Iterator[None]:
    """The same around the making of a DistributedDataParallel, which asks torch._dynamo how it is set.

    Where nobody has imported that, nobody can have set it, and the answer is its default.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    context_manager = getattr(DistributedDataParallel, "_inside_ddp_forward", None)
    leave_eager(getattr(context_manager, "__wrapped__", None))
    utils = _Unimported("torch._dynamo.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
    stand_in = vars(torch)["_dynamo"] = _Unimported("torch._dynamo", utils=utils)
    try:
        yield
    finally:
        if vars(torch)["_dynamo"] is stand_in:
            del vars(torch)["_dynamo"]


class _Unimported:
    """Knows some of a module's names, and imports it for any other."""

    def __init__(self, module: str, **known: Any) -> None:
        self._module = module
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)


def _unbroken(step: Callable[..., Any]) -> Callable[..., Any]:
    """torch's wrapper of a step without its breaks of a compiled graph, where there can be none."""
    inner: Callable[..., Any] = vars(step)["__wrapped__"]

    @functools.wraps(inner)
    def called(optimizer: Optimizer, *arguments: Any, **named: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return step(optimizer, *arguments, **named)
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return inner(optimizer, *arguments, **named)

    return called
