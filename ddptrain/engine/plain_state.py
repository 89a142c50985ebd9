"""What a checkpoint may hold: what ``torch.load(weights_only=True)`` reads, which runs no code."""

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ddptrain.errors import UserError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def check_plain(state: Mapping[str, Any], everywhere: bool = True) -> None:
    """Raises UserError that names the first value which could be written and not be read again. everywhere:
    all ranks look at it."""
    for place, value in _others(state, ""):
        raise UserError(
            f"checkpoint: {place.lstrip('.')} is a {type(value).__module__}.{type(value).__qualname__}, which"
            " could not be loaded again. State is made of tensors and Python's own numbers, texts, lists and"
            " dicts: convert it (float(...), list(...)).",
            everywhere=everywhere,
        )


def with_interned_texts(value: Any) -> Any:
    """The same value, in which equal texts are one object. pickle writes an object once, and refers to it
    after that: so equal states become equal bytes, whichever of their texts were read from a checkpoint."""
    if type(value) is str:
        return sys.intern(value)
    if type(value) in (dict, OrderedDict):
        pairs = [(with_interned_texts(key), with_interned_texts(inner)) for key, inner in value.items()]
        copied = type(value)(pairs)
        if isinstance(copied, OrderedDict):
            vars(copied).update(vars(value))  # a model's _metadata
        return copied
    if type(value) in (list, tuple):
        return type(value)(map(with_interned_texts, value))
    return value


def _others(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """What is neither plain nor made of plain values; exact types, for NumPy's float is one of Python's."""
    if isinstance(value, Tensor) or type(value) in _PLAIN:
        return
    if type(value) in (dict, OrderedDict):
        for name, inner in value.items():
            yield from _others(name, f"{place}.{name} (the key)")
            yield from _others(inner, f"{place}.{name}")
    elif type(value) in (list, tuple, set):
        for i, inner in enumerate(value):
            yield from _others(inner, f"{place}[{i}]")
    else:
        yield place, value
