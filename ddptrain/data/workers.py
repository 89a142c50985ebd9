"""Batches read by a DataLoader's workers, in order, and brought to the device."""

import multiprocessing
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ddptrain.data.prefetch import on_device
from ddptrain.distributed.threads import cores
from ddptrain.distributed.world import World
from ddptrain.errors import UserError


def spare_cores(world: World) -> int:
    """A loader process for each core that this rank's own process leaves free, eight at most."""
    return max(0, min(8, cores() // world.local_size - 1))


def read_by_workers(
    dataset: Dataset[Any], keys: Iterable[list[Any]], workers: int, device: torch.device
) -> Iterator[Any]:
    """A batch for each list of keys, by the dataset's ``__getitems__``, on the device.

    A broken file comes back from there as its UserError, for an exception would reach the trainer as a
    worker's traceback; it is raised here.
    """
    # forkserver: a fork of this process would inherit the locks of its threads (gloo, loggers)
    context = multiprocessing.get_context("forkserver") if workers else None
    if context is not None:
        context.set_forkserver_preload([type(dataset).__module__])
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=keys,
        collate_fn=_as_is,
        num_workers=workers,
        multiprocessing_context=context,
        pin_memory=device.type == "cuda",
    )
    return on_device(_sound(loader), device)


def _as_is(batch: Any) -> Any:
    return batch


def _sound(loader: DataLoader[Any]) -> Iterator[Any]:
    for batch in loader:
        if isinstance(batch, UserError):
            raise batch
        yield batch
