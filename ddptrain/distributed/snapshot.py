"""What the passes of a model change beside its parameters: buffers, in place or replaced, and extra state."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, final

import torch
from torch import Tensor, nn

from ddptrain.distributed.foreach import by_dtype, copy_all


def saved_buffers(layers: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Those that a checkpoint holds, with their layers and names; of ``persistent=False`` are caches. Looked
    up in the layers' own tables: `nn.Module.named_buffers` takes a millisecond for a MobileNetV3."""
    for layer in layers:
        for name, buffer in layer._buffers.items():
            if buffer is not None and name not in layer._non_persistent_buffers_set:
                yield layer, name, buffer


def with_extra_state(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The layers that have more state than tensors (``get_extra_state``)."""
    return [layer for layer in layers if type(layer).get_extra_state is not nn.Module.get_extra_state]


@final
class Snapshot:
    """The buffers and the extra state of some layers, as they are now.

    layers: each once, as `nn.Module.modules` gives them. A sparse buffer is taken for a constant.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._buffers = [dict(layer._buffers) for layer in layers]
        self._values = [_packed(group) for group in by_dtype(_dense(self._buffers))]
        self._extra = [(layer, deepcopy(layer.get_extra_state())) for layer in with_extra_state(layers)]

    def restore(self) -> None:
        """Put all back: the values, and the tensors themselves where a layer has made or replaced one."""
        for layer, buffers in zip(self._layers, self._buffers, strict=True):
            layer._buffers.clear()
            layer._buffers.update(buffers)
        for group, values in zip(by_dtype(_dense(self._buffers)), self._values, strict=True):
            copy_all(group, _unpacked(values, group))
        self._restore_extra_state()

    @torch.no_grad()
    def restore_where(self, bad: Tensor) -> None:
        """The same where ``bad`` (0-d, bool) is true, decided on the device. Only of a model with extra
        state, or where a buffer was made or got another size, a sync point."""
        now = [layer._buffers for layer in self._layers]
        if _sizes(now) != _sizes(self._buffers):
            if bool(bad):
                self.restore()
            return
        for group, values in zip(by_dtype(_dense(now)), self._values, strict=True):
            copy_all(group, _unpacked(torch.where(bad, values, _packed(group)), group))
        if self._extra and bool(bad):
            self._restore_extra_state()

    def _restore_extra_state(self) -> None:
        for layer, state in self._extra:
            layer.set_extra_state(deepcopy(state))


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Around passes that must leave no trace: afterwards buffers and extra state are as before."""
    before = Snapshot(list(model.modules()))
    try:
        yield
    finally:
        before.restore()


def _dense(buffers: Sequence[dict[str, Tensor | None]]) -> list[Tensor]:
    every = (buffer for own in buffers for buffer in own.values())
    return [buffer for buffer in every if buffer is not None and buffer.layout == torch.strided]


def _sizes(buffers: Sequence[dict[str, Tensor | None]]) -> list[dict[str, Any]]:
    return [
        {name: None if buffer is None else (buffer.shape, buffer.dtype) for name, buffer in own.items()}
        for own in buffers
    ]


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """(k,): the numbers of tensors of one dtype, one after another."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _unpacked(values: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = values.split([tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]
