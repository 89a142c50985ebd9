"""The next batch, copied to the device or made there, while this one computes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

copy_waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=1000)
"""Before and after each wait of the computing stream for a batch, in this process: for the split of a
step's time, which takes them out."""


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch (tensors in tuples, lists or mappings) on the device.

    From pinned memory to a GPU the host does not wait for the copy. Elsewhere it does: Metal may read what
    has been freed meanwhile (pytorch#139550).
    """
    return changed(batch, lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))


def rows_of(batch: Any, rows: slice) -> Any:
    """The batch with these rows of each of its tensors."""
    return changed(batch, lambda tensor: tensor[rows])


def changed(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with each of its tensors changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if type(batch) is dict:
        return {name: changed(value, change) for name, value in batch.items()}
    if isinstance(batch, MutableMapping):  # transformers' BatchEncoding and ModelOutput, which refuses update
        copied = copy(batch)
        for name, value in batch.items():
            copied[name] = changed(value, change)
        return copied
    if isinstance(batch, PackedSequence):  # its batch_sizes always lie on the CPU
        order = [None if t is None else change(t) for t in (batch.sorted_indices, batch.unsorted_indices)]
        return PackedSequence(change(batch.data), batch.batch_sizes, *order)
    if isinstance(batch, tuple | list):
        items = [changed(item, change) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Every tensor in a batch that is on its device."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, PackedSequence):
        yield batch.data
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, tuple | list):
        for item in batch:
            yield from tensors_of(item)


def on_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """The batches on the device, in order. On a GPU one ahead, on a separate stream: copies from the
    host's memory, and whatever is done on the device to make a batch."""
    if device.type != "cuda":
        return (to_device(batch, device) for batch in batches)
    return _one_ahead(iter(batches), device)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all iterators: torch's allocator gives freed memory only to the stream that took it, so each
    new stream (torch has 32 of them) would take the memory of some batches once more, and keep it."""
    return torch.cuda.Stream(device)


def _one_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    bringing = _copy_stream(device)
    bringing.wait_stream(torch.cuda.current_stream(device))  # a resident set may still be on its way

    def bring() -> Any:
        with torch.cuda.stream(bringing):
            return to_device(next(batches, None), device)

    prefetched = bring()
    while prefetched is not None:
        computing = torch.cuda.current_stream(device)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(computing)
        computing.wait_stream(bringing)  # on the device; the host goes on
        after.record(computing)
        copy_waits.append((before, after))
        for tensor in tensors_of(prefetched):
            # its memory belongs to the other stream, which must not reuse it while we compute
            tensor.record_stream(computing)
        batch, prefetched = prefetched, bring()
        yield batch
