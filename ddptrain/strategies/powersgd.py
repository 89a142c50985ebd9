"""Gradients that travel as two thin factors; what those leave out goes along in the next step.

PowerSGD: Vogels, Karimireddy, Jaggi, NeurIPS 2019 (arXiv 1905.13727), algorithms 1 and 2, from the first step
on. Not torch's own hook: that starts collectives in gloo's threads and waits there for others, so that two
buckets wait for each other for ever (seen with torch 2.11 and 2.15); its feedback covers what it does not
compress too, where one NaN would stay; and it is kept by bucket, which no checkpoint could name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.utils.rnn import pad_sequence

from ddptrain import torch_private

_SAVES = 2
"""A matrix is factored where that divides its numbers by more than this."""
_UNKNOWN = torch.empty(0)
_TINY = torch.finfo(torch.float32).tiny


@dataclass(slots=True)
class _Matrix:
    """One gradient on its way. n, m: its first dimension, and all others together; r: the rank."""

    name: str
    gradient: Tensor
    """(n, m), a view of the bucket."""
    whole: Tensor
    """(n, m): the gradient and what was left out before; then what is left out now."""
    left: Tensor = _UNKNOWN
    """(n, r): orthonormal columns, the same on all ranks."""
    right: Tensor = _UNKNOWN
    """(m, r): this rank's."""


@dataclass(slots=True)
class _Trip:
    """One bucket on its way: there with what is not factored and the left factors, and again with the right
    ones."""

    buffer: Tensor
    future: Future[Tensor]
    plain: list[Tensor]
    matrices: list[_Matrix]
    sent: Tensor
    work: dist.Work


class PowerSgd:
    """One rank's side of it, for ``register_comm_hook(PowerSgd(...), PowerSgd.reduce)``.

    model: parameters of two dimensions or more are taken as matrices of their first dimension by the rest.
    rank: columns of a factor. at_once: the model's first backward pass comes under DDP's static_graph, which
    waits for its buckets inside of what would finish them.
    """

    def __init__(self, model: nn.Module, rank: int, world_size: int, at_once: bool) -> None:
        self._world_size = world_size
        self._at_once = at_once
        self._names: dict[Tensor, str] = {}
        self._left_out: dict[str, Tensor] = {}
        """(n, m): of this rank's gradients, by parameter. Never changed in place."""
        self._right: dict[str, Tensor] = {}
        """(m, r): the last step's right factors, the same on all ranks. Never changed in place."""
        self._open: list[_Trip] = []
        for name, parameter in model.named_parameters():
            n, m = parameter.shape[:1].numel(), parameter.shape[1:].numel()
            r = min(n, m, rank)
            if not (parameter.requires_grad and parameter.is_floating_point()):
                continue
            if (n + m) * r * _SAVES < n * m:
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                self._names[parameter] = name
                self._left_out[name] = torch.zeros(n, m, dtype=dtype, device=parameter.device)
                start = torch.randn(m, r, generator=torch.Generator().manual_seed(len(self._names)))
                self._right[name] = start.to(self._left_out[name])

    def rank_state(self) -> dict[str, Tensor]:
        """What the next step needs of the last one. Snapshots: later steps make new tensors."""
        skipped = {f"left_out.{name}": value for name, value in self._left_out.items()}
        return skipped | {f"right.{name}": value for name, value in self._right.items()}

    def load_rank_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `rank_state` has returned; what it does not hold, or in another shape, stays."""
        for kind, own in (("left_out", self._left_out), ("right", self._right)):
            for name, value in own.items():
                kept = tensors.get(f"{kind}.{name}")
                if kept is not None and kept.shape == value.shape:
                    own[name] = kept.to(value)

    @torch.no_grad()
    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """DDP's hook. Two all-reduces for a bucket with something to factor, one for another.

        A bucket's second one starts when the next bucket comes, on the thread that runs the backward pass:
        so all ranks start all of them in the same order, and they travel behind the rest of that pass.
        """
        if bucket.index() == 0:
            self._open = []
        trip = self._departed(bucket)
        if self._open:
            self._turn(self._open[-1])
        self._open.append(trip)
        if bucket.is_last():
            if self._at_once:
                self._arrive()
            else:  # after the pass: a rank waits here for the others, and the stopwatch says so
                torch_private.at_end_of_backward(self._arrive)
        return trip.future

    def _departed(self, bucket: GradBucket) -> _Trip:
        """The first all-reduce begins."""
        buffer = bucket.buffer()
        plain: list[Tensor] = []
        matrices: list[_Matrix] = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self._names.get(parameter)
            if name is None:
                plain.append(gradient)
            else:
                matrix = gradient.view(len(gradient), -1)
                matrices.append(_Matrix(name, matrix, self._left_out[name] + matrix))
        lefts = [matrix.whole @ self._right[matrix.name] for matrix in matrices]
        sent = _packed([*plain, *lefts]) if matrices else buffer
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        return _Trip(buffer, future, plain, matrices, sent, _begun(sent))

    def _turn(self, trip: _Trip) -> None:
        """The first all-reduce is over, and the second begins. On a CPU the host waits for the first."""
        mean = self._mean(trip)
        if not trip.matrices:
            return
        shapes = [(len(matrix.whole), self._right[matrix.name].shape[1]) for matrix in trip.matrices]
        parts = mean.split([*(gradient.numel() for gradient in trip.plain), *(n * r for n, r in shapes)])
        for gradient, part in zip(trip.plain, parts, strict=False):
            gradient.copy_(part.view_as(gradient))
        lefts = [part.view(shape) for part, shape in zip(parts[len(trip.plain) :], shapes, strict=True)]
        for matrix, left in zip(trip.matrices, _orthonormal(lefts), strict=True):
            matrix.left = left
            matrix.right = matrix.whole.T @ matrix.left
            # of its own right factor, not of the mean: or it would add up how this rank's gradients differ
            matrix.whole.sub_(matrix.left @ matrix.right.T)
            self._left_out[matrix.name] = matrix.whole
        trip.sent = _packed([matrix.right for matrix in trip.matrices])
        trip.work = _begun(trip.sent)

    @torch.no_grad()
    def _arrive(self) -> None:
        """All of a step's buckets have begun: end them."""
        trips, self._open = self._open, []
        self._turn(trips[-1])
        for trip in trips:
            if trip.matrices:
                rights = [self._right[matrix.name] for matrix in trip.matrices]
                parts = self._mean(trip).split([right.numel() for right in rights])
                for matrix, part, right in zip(trip.matrices, parts, rights, strict=True):
                    self._right[matrix.name] = part.view_as(right)
                    matrix.gradient.copy_(matrix.left @ part.view_as(right).T)
            trip.future.set_result(trip.buffer)

    def _mean(self, trip: _Trip) -> Tensor:
        trip.work.wait()
        return trip.sent.div_(self._world_size)


def _orthonormal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Of each (n, r), any n and one r: orthonormal columns that span the same, by Gram and Schmidt. A column
    of zeros is replaced by a unit vector: else a gradient that is zero once would never arrive again.

    Twice over, for once leaves too much of a column that is nearly a sum of those before (Giraud et al.,
    Numerische Mathematik 101, 2005); and all matrices together, where on a GPU torch.linalg.qr is a chain of
    launches for each.
    """
    given = pad_sequence(list(matrices), batch_first=True)
    found = given[:, :, :0]
    for i in range(given.shape[2]):
        column = given[:, :, i : i + 1]
        unit = torch.zeros_like(column)
        unit[:, i] = 1
        column = torch.where(column.norm(dim=1, keepdim=True) == 0, unit, column)
        for _ in range(2):
            column = column / column.norm(dim=1, keepdim=True).clamp(min=_TINY)
            column = column - found @ (found.mT @ column)
        column = column / column.norm(dim=1, keepdim=True).clamp(min=_TINY)
        found = torch.cat([found, column], dim=2)
    return [basis[: len(matrix)] for basis, matrix in zip(found, matrices, strict=True)]


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """(k,), in the widest of their dtypes."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _begun(tensor: Tensor) -> dist.Work:
    """Its all-reduce, in place."""
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    return work
