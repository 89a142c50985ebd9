"""Scales sums over micro-batches to the gradient of the mean over the global batch."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ddptrain.api.recipe import Loss
from ddptrain.api.sampler import Sampler
from ddptrain.api.strategy import Strategy
from ddptrain.distributed.comm import add_up
from ddptrain.errors import UserError


class LossScale:
    def __init__(self, strategy: Strategy, sampler: Sampler, least_count: float) -> None:
        """least_count: `Task.least_count`."""
        self._strategy = strategy
        self._world = strategy.world
        self._sampler = sampler
        self._least = least_count
        self._weights: dict[tuple[float, torch.dtype], Tensor] = {}
        self._first: tuple[int, int] | None = None
        """Count and samples of the first micro-batch whose count is an int."""
        self._kind: type | None = None
        """Of counts: int or Tensor, as in the first micro-batch."""

    def weight(self, loss: Loss, size: int) -> Tensor:
        """The factor of a micro-batch's loss sum in the backward pass. size: its samples.

        If the count is only known on the device, the global batch's size is used until `rescale`.
        """
        if type(loss.count) is not self._kind:
            self._check_kind(type(loss.count))
        each = self._each(loss.count, size) if isinstance(loss.count, int) else 1.0
        value = self._strategy.averages_over / (each * self._sampler.batch_size)
        key = (value, loss.sum.dtype)
        if key not in self._weights:
            if loss.sum.ndim:
                shape = tuple(loss.sum.shape)
                raise RuntimeError(f"Task.loss: sum must be one number, a 0-d tensor, and has shape {shape}")
            self._weights[key] = torch.full((), value, dtype=loss.sum.dtype, device=loss.sum.device)
        return self._weights[key]

    def _check_kind(self, kind: type) -> None:
        if self._kind is None and (kind is int or issubclass(kind, Tensor)):
            self._kind = kind
            return
        before = "" if self._kind is None else f", and was {self._kind.__name__} before"
        raise UserError(
            f"Task.loss: count is {kind.__name__}{before}: it must always be an int, or, where it differs"
            " between samples, always a 0-d tensor.",
            everywhere=False,
        )

    def _each(self, count: int, size: int) -> float:
        """What an int says of each sample."""
        if not count:
            said = "Task.loss: count is 0; where it may be 0, it must be a 0-d tensor, not an int."
            raise UserError(said, everywhere=False)
        self._first = first, samples = self._first or (count, size)
        if count * samples != first * size:
            raise UserError(
                f"Task.loss: count is the int {count} of {size} samples, and was {first} of {samples}: an int"
                " promises the same for each sample. Where it differs it must be a 0-d tensor (mask.sum()).",
                everywhere=False,
            )
        return count / size

    def rescale(self, model: nn.Module, counts: Sequence[tuple[int, Tensor]]) -> None:
        """Divide by the global count instead of the global batch size. One small all-reduce.

        counts: (shard, count) of each of this rank's micro-batches.
        """
        shards = torch.zeros(self._sampler.shards or self._world.size, device=self._world.device)
        for shard, count in counts:
            shards[shard] += count
        total = add_up(self._world, shards).sum()
        size = self._sampler.batch_size
        if self._least:
            factor = size / total.clamp(min=self._least)
        else:  # a total of 0 counts as 1, in one launch
            factor = torch.nan_to_num(size / total, nan=math.nan, posinf=size)
        local = self._strategy.local
        torch._foreach_mul_([local(p.grad) for p in model.parameters() if p.grad is not None], factor)
