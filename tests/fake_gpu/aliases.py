"""A fake GPU's memory, as the CPU sees it."""

import ctypes
from typing import Any

import torch
from torch import Tensor


def alias(tensor: Tensor) -> Tensor:
    """A CPU tensor over the same memory."""
    storage = tensor.untyped_storage()
    if not tensor.is_cuda or storage.nbytes() == 0 or tensor.numel() == 0:
        return (
            tensor
            if not tensor.is_cuda
            else torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        )
    return over_the_memory_of(tensor)


def over_the_memory_of(tensor: Tensor) -> Tensor:
    """A CPU tensor that does not hold the memory."""
    storage = tensor.untyped_storage()
    raw = torch.frombuffer(
        (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8
    )
    shaped = torch.empty(0, dtype=tensor.dtype)
    return shaped.set_(raw.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def on_cpu(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return alias(leaf)
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return leaf
