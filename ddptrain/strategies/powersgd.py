"""PowerSGD: gradients are sent as two thin factors; the approximation error is added to the next step's
gradient.

PowerSGD: Vogels, Karimireddy, Jaggi, NeurIPS 2019 (arXiv 1905.13727), algorithms 1 and 2, from the first step
on. torch's own hook is not used: it starts collectives in gloo's threads and waits there for others, so two
buckets can wait for each other for ever (seen with torch 2.11 and 2.15); its error feedback includes what is
not compressed, where one NaN would stay; and it is stored by bucket, which a checkpoint can't name.
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
"""A matrix is factored if that reduces its size by more than this factor."""
_UNKNOWN = torch.empty(0)
_TINY = torch.finfo(torch.float32).tiny


@dataclass(slots=True)
class _Matrix:
    """One gradient. n, m: its first dimension, and the product of the others; r: the rank."""

    name: str
    gradient: Tensor
    """(n, m), a view of the bucket."""
    whole: Tensor
    """(n, m): the gradient plus the last error; then the new error."""
    left: Tensor = _UNKNOWN
    """(n, r): orthonormal columns, the same on all ranks."""
    right: Tensor = _UNKNOWN
    """(m, r): this rank's."""


@dataclass(slots=True)
class _Exchange:
    """One bucket: first all-reduced with what is not factored and the left factors, then with the right
    factors."""

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
        """(n, m): errors of this rank's gradients, by parameter. Never changed in place."""
        self._right: dict[str, Tensor] = {}
        """(m, r): the last step's right factors, the same on all ranks. Never changed in place."""
        self._open: list[_Exchange] = []
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
        """The errors and right factors. Snapshots: later steps make new tensors."""
        skipped = {f"left_out.{name}": value for name, value in self._left_out.items()}
        return skipped | {f"right.{name}": value for name, value in self._right.items()}

    def load_rank_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `rank_state` has returned; entries that are missing or of another shape are kept."""
        for kind, own in (("left_out", self._left_out), ("right", self._right)):
            for name, value in own.items():
                kept = tensors.get(f"{kind}.{name}")
                if kept is not None and kept.shape == value.shape:
                    own[name] = kept.to(value)

    @torch.no_grad()
    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """DDP's hook. Two all-reduces for a bucket with something to factor, one for another.

        A bucket's second one starts when the next bucket arrives, in the thread of the backward pass: all
        ranks start them in the same order, and they overlap with the rest of the pass.
        """
        if bucket.index() == 0:
            self._open = []
        exchange = self._start(bucket)
        if self._open:
            self._start_second(self._open[-1])
        self._open.append(exchange)
        if bucket.is_last():
            if self._at_once:
                self._finish()
            else:  # after the pass: waiting for other ranks then counts as all_reduce
                torch_private.at_end_of_backward(self._finish)
        return exchange.future

    def _start(self, bucket: GradBucket) -> _Exchange:
        """Start the first all-reduce."""
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
        return _Exchange(buffer, future, plain, matrices, sent, _all_reduce_async(sent))

    def _start_second(self, exchange: _Exchange) -> None:
        """Wait for the first all-reduce and start the second. On a CPU the host waits for the first."""
        mean = self._mean(exchange)
        if not exchange.matrices:
            return
        shapes = [(len(matrix.whole), self._right[matrix.name].shape[1]) for matrix in exchange.matrices]
        parts = mean.split([*(gradient.numel() for gradient in exchange.plain), *(n * r for n, r in shapes)])
        for gradient, part in zip(exchange.plain, parts, strict=False):
            gradient.copy_(part.view_as(gradient))
        lefts = [part.view(shape) for part, shape in zip(parts[len(exchange.plain) :], shapes, strict=True)]
        for matrix, left in zip(exchange.matrices, _orthonormal(lefts), strict=True):
            matrix.left = left
            matrix.right = matrix.whole.T @ matrix.left
            # with its own right factor, not the mean: else ranks' differences would accumulate
            matrix.whole.sub_(matrix.left @ matrix.right.T)
            self._left_out[matrix.name] = matrix.whole
        exchange.sent = _packed([matrix.right for matrix in exchange.matrices])
        exchange.work = _all_reduce_async(exchange.sent)

    @torch.no_grad()
    def _finish(self) -> None:
        """Finish all buckets of a step."""
        exchanges, self._open = self._open, []
        self._start_second(exchanges[-1])
        for exchange in exchanges:
            if exchange.matrices:
                rights = [self._right[matrix.name] for matrix in exchange.matrices]
                parts = self._mean(exchange).split([right.numel() for right in rights])
                for matrix, part, right in zip(exchange.matrices, parts, rights, strict=True):
                    self._right[matrix.name] = part.view_as(right)
                    matrix.gradient.copy_(matrix.left @ part.view_as(right).T)
            exchange.future.set_result(exchange.buffer)

    def _mean(self, exchange: _Exchange) -> Tensor:
        exchange.work.wait()
        return exchange.sent.div_(self._world_size)


def _orthonormal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """For each (n, r), any n and the same r: orthonormal columns with the same span, by Gram-Schmidt. A
    column of zeros is replaced by a unit vector; otherwise a gradient that is zero once would stay zero.

    Applied twice, for numerical orthogonality (Giraud et al., Numerische Mathematik 101, 2005), and to all
    matrices together: on a GPU torch.linalg.qr is a series of launches for each.
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
    """(k,): all tensors concatenated, in the widest of their dtypes."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _all_reduce_async(tensor: Tensor) -> dist.Work:
    """Start an in-place all-reduce."""
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    return work
