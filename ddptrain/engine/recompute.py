"""train.recompute: activations that are not kept for the backward pass but computed again in it (Chen et al.,
arXiv 1604.06174)."""

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from ddptrain.engine.flops import uncounted
from ddptrain.engine.parameter_groups import matching
from ddptrain.errors import UserError


def recompute(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Let the outermost modules that match compute their activations again in the backward pass; returns
    their names.

    Their class is replaced by a subclass of the same name: names, hooks and state stay as they are. A copy of
    such a module is a plain one. Raises UserError where a pattern matches no module with a forward of its
    own.
    """
    called = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if name and type(module).forward is not nn.Module.forward  # a ModuleList is never called
    }
    chosen: set[str] = set()
    for pattern in patterns:
        chosen |= matching(pattern, called, f"train.recompute={pattern}", "module that is called")
    outermost = [
        name
        for name in called
        if name in chosen and not any(name.startswith(f"{above}.") for above in chosen)
    ]
    modules = list(dict.fromkeys(called[name] for name in outermost))
    kinds = {type(module): _recomputing(type(module)) for module in modules}
    for module in modules:
        module.__class__ = kinds[type(module)]
    return outermost


def _recomputing(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass whose forward pass in training keeps its inputs only."""

    def forward(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return kind.forward(self, *inputs, **named)
        if torch.compiler.is_compiling():  # the graph's buffers are changed at its end, once
            return checkpoint(
                lambda *inputs: kind.forward(self, *inputs, **named), *inputs, use_reentrant=False
            )
        before = _Buffers(self)
        again = False

        def run(*given: Any) -> Any:
            nonlocal again
            arguments = given[: len(inputs)], dict(zip(named, given[len(inputs) :], strict=True))
            if again:
                with before.restored(), uncounted():
                    return kind.forward(self, *arguments[0], **arguments[1])
            again = True
            return kind.forward(self, *arguments[0], **arguments[1])

        given = (*inputs, *named.values())  # autograd notices a change of those that it is given one by one
        versions = [(x, x._version) for x in given if isinstance(x, Tensor)]
        outputs = checkpoint(run, *given, use_reentrant=False)
        if any(x._version != version for x, version in versions):
            raise UserError(
                f"train.recompute: a {kind.__name__} that matches changes its input in place, so it can't be"
                " computed again. Name the block around it."
            )
        return outputs

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced = kind.__reduce_ex__(self, protocol)
        assert isinstance(reduced, tuple)
        constructor, arguments, *rest = reduced
        plain = (kind if part is own else part for part in arguments)
        return (
            operator.call,
            (constructor, *plain),
            *rest,
        )  # pickle refuses another class in ``constructor`` itself

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "written_as": kind}
    own = type(kind.__name__, (kind,), {**names, "forward": forward, "__reduce_ex__": reduce})
    return own


class _Buffers:
    """A module's buffers before its forward pass: copies, but of norms, which do not read their statistics in
    training."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = [
            (owner, name, None if isinstance(owner, _NormBase) else buffer.clone())
            for owner, name, buffer in _buffers(module)
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the module has copies of them: its own are not changed, not even back, for autograd refuses
        a backward pass that has kept one of them."""
        now = list(_buffers(self._module))
        try:
            for owner, name, value in self._before:
                setattr(owner, name, (getattr(owner, name) if value is None else value).clone())
            yield
        finally:
            for owner, name, buffer in now:
                setattr(owner, name, buffer)


def _buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            yield owner, name, buffer
