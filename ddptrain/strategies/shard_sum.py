"""The gradients of a global batch's shards, added in one order on any number of ranks, during the backward
pass.

The order is a binary tree over the shards, pair by pair and level by level. A rank holds consecutive shards,
so it first adds complete subtrees of its own, like a binary counter: it keeps their few sums, and not a
gradient of each shard. While its last shard's backward pass runs, ranks exchange these partial sums, bucket
by bucket: each gets all of them for its chunk of the bucket (all-to-all), finishes the tree there, and sends
the total to all (all-gather). With one partial sum on each rank, these are the bytes of a ring all-reduce:
2 (ranks - 1) / ranks of the gradient; with one on each of two ranks, it is one. Elements are added
independently of each other, so buckets and chunks may differ in another world.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddptrain.api.world import World, shards_of
from ddptrain.errors import UserError

_BUCKET = 4 << 20
"""Bytes. Smaller than DDP's, because what is received, and gloo's copies of it, take memory too: of a bucket
or two at a time."""
_ALIGNED = 16
"""Gradients begin at multiples of so many values: the order of a kernel's sums (a norm's) may depend on the
alignment."""

Span = tuple[int, int]
"""The shards of a sum, as [first, end)."""


def merge_siblings(spans: Sequence[Span], shards: int) -> tuple[list[Span], list[int]]:
    """Add up neighbouring sums as the tree over all shards does, as soon as both are there. Returns the sums
    that are left, and after each span how often the last two are added."""
    left: list[Span] = []
    additions = []
    for span in spans:
        left.append(span)
        before = len(left)
        while len(left) > 1 and _are_siblings(left[-2], left[-1], shards):
            _, end = left.pop()
            left[-1] = (left[-1][0], end)
        additions.append(before - len(left))
    return left, additions


def _are_siblings(a: Span, b: Span, shards: int) -> bool:
    """Whether two neighbours are the children of one node. A first child has a power of two of shards, a
    second one as many, or those that are left."""
    size = a[1] - a[0]
    return a[0] % (2 * size) == 0 and b[1] == min(a[1] + size, shards)


@final
class ShardSum:
    """One rank's side of it. Call `begin` before the last backward pass of each shard and `end` after it:
    the shard's gradients are taken from the parameters. After the last shard's `end`, `finish` gives every
    parameter the total.

    parameters: by name, the same on all ranks, on one device. Without a gradient they count as zero.
    """

    def __init__(self, world: World, parameters: dict[str, nn.Parameter], shards: int) -> None:
        self._world = world
        runs = [[(i, i + 1) for i in shards_of(rank, world.size, shards)] for rank in range(world.size)]
        ranks = [merge_siblings(run, shards)[0] for run in runs]
        self._partial_sums = [len(spans) for spans in ranks]
        """Of each rank."""
        _, self._own_additions = merge_siblings(runs[world.rank], shards)
        _, self._additions = merge_siblings([span for spans in ranks for span in spans], shards)
        self._buckets = [_Bucket(group, world.size) for group in _groups(parameters)]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, bucket, name))
            for bucket in self._buckets
            for name, parameter in bucket.parameters.items()
        ]
        self._is_open = False
        self._done = 0
        """Shards of this step."""
        self._held = 0
        """Partial sums of these."""
        self._next = 0
        """The first bucket that still lacks a gradient."""

    def remove(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()

    @property
    def is_first_shard(self) -> bool:
        return self._done == 0

    @property
    def _is_last_shard(self) -> bool:
        return self._done == len(self._own_additions) - 1

    def begin(self) -> None:
        self._is_open, self._next = True, 0
        for bucket in self._buckets:
            bucket.missing = set(bucket.parameters)

    @torch.no_grad()
    def end(self) -> bool:
        """Returns whether it was this rank's last shard."""
        for bucket in self._buckets[self._next :]:
            for name in sorted(bucket.missing):
                self._take(bucket, name)
        self._advance()
        self._is_open = False
        if self._is_last_shard:
            return True
        self._held += 1 - self._own_additions[self._done]
        self._done += 1
        return False

    @torch.no_grad()
    def finish(self) -> None:
        """Give every parameter the total. Waits for the other ranks."""
        if self._buckets[-1].received is not None:
            self._start_gathering(self._buckets[-1])
        for bucket in self._buckets:
            bucket.wait()
            for name, parameter in bucket.parameters.items():
                parameter.grad = bucket.gradients[0][name]
        self._done = self._held = 0

    def _on_gradient(self, bucket: "_Bucket", name: str, parameter: nn.Parameter) -> None:
        """In the backward pass: a parameter's gradient is complete."""
        if not self._is_open:
            return
        if name not in bucket.missing:
            raise UserError(
                f"strategy=strict: {name} got its gradient in several parts of one backward pass, as"
                " torch.utils.checkpoint(use_reentrant=True) does for shared weights."
                " Use use_reentrant=False.",
                everywhere=False,
            )
        self._take(bucket, name)
        self._advance()

    def _take(self, bucket: "_Bucket", name: str) -> None:
        """Add a gradient to the last partial sum, or begin another with it."""
        parameter = bucket.parameters[name]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if self._own_additions[self._done]:
            bucket.gradients[self._held - 1][name].add_(gradient)
        else:
            bucket.gradients_at(self._held)[name].copy_(gradient)
        bucket.missing.discard(name)

    def _advance(self) -> None:
        """Finish this shard's sums of each complete bucket, and send those of the last one; in the same order
        on all ranks."""
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            bucket = self._buckets[self._next]
            last = self._held - 1  # the first addition was that of the gradients
            for i in range(last, last - self._own_additions[self._done] + 1, -1):
                bucket.sums[i - 1].add_(bucket.sums[i])
            if self._is_last_shard and self._world.size > 1:
                self._start_exchange(bucket)
            self._next += 1

    def _start_exchange(self, bucket: "_Bucket") -> None:
        """Start the all-to-all, after the all-gather of the bucket before."""
        if self._partial_sums == [1, 1]:  # two numbers have one sum
            bucket.work = dist.all_reduce(bucket.sums[0], async_op=True)
            return
        if self._next:
            self._start_gathering(self._buckets[self._next - 1])
        size, own = self._world.size, self._partial_sums[self._world.rank]
        sums = [part.view(size, -1) for part in bucket.sums[:own]]
        chunk = sums[0].shape[1]
        sent = sums[0] if own == 1 else torch.stack(sums, dim=1)
        received = sent.new_empty(sum(self._partial_sums) * chunk)
        bucket.received = received
        bucket.work = dist.all_to_all_single(
            received,
            sent.view(-1),
            [n * chunk for n in self._partial_sums],
            [own * chunk] * size,
            async_op=True,
        )

    def _start_gathering(self, bucket: "_Bucket") -> None:
        """Wait for the all-to-all, add up this rank's chunk, and start the all-gather. On a CPU the host
        waits."""
        bucket.wait()
        assert bucket.received is not None
        stack: list[Tensor] = []
        for row, additions in zip(
            bucket.received.view(len(self._additions), -1), self._additions, strict=True
        ):
            stack.append(row)
            for _ in range(additions):
                right = stack.pop()
                stack[-1].add_(right)
        (total,) = stack
        # in place: what was received is given back now, and not when the all-gather has ended
        chunk = bucket.sums[0].view(self._world.size, -1)[self._world.rank].copy_(total)
        bucket.received = None
        bucket.work = dist.all_gather_into_tensor(bucket.sums[0], chunk, async_op=True)


@final
class _Bucket:
    """Gradients that are sent together, side by side in one tensor, each with its parameter's strides."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], ranks: int) -> None:
        self.parameters = parameters
        ends = [0]
        for parameter in parameters.values():
            ends.append(ends[-1] + -(-parameter.numel() // _ALIGNED) * _ALIGNED)
        self._begins = dict(zip(parameters, ends, strict=False))
        self._size = -(-max(ends[-1], 1) // ranks) * ranks
        self.missing: set[str] = set()
        self.sums: list[Tensor] = []
        """(size,) each: partial sums, kept from step to step."""
        self.gradients: list[dict[str, Tensor]] = []
        """Their parts, by parameter."""
        self.received: Tensor | None = None
        self.work: dist.Work | None = None
        """What was started last."""

    def gradients_at(self, place: int) -> dict[str, Tensor]:
        """The parts of a partial sum."""
        if place == len(self.sums):
            flat = next(iter(self.parameters.values())).new_zeros(self._size)
            self.sums.append(flat)
            self.gradients.append(
                {name: _part(flat, self._begins[name], p) for name, p in self.parameters.items()}
            )
        return self.gradients[place]

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None


def _part(flat: Tensor, begin: int, parameter: nn.Parameter) -> Tensor:
    strides = torch.empty_like(parameter, device="meta").stride()  # without gaps
    return flat.as_strided(parameter.shape, strides, begin)


def _groups(parameters: dict[str, nn.Parameter]) -> Iterator[dict[str, nn.Parameter]]:
    """One for each bucket: of one dtype, in about the order in which a backward pass comes to them."""
    groups: dict[torch.dtype, dict[str, nn.Parameter]] = {}
    for name, parameter in reversed(parameters.items()):
        group = groups.setdefault(parameter.dtype, {})
        group[name] = parameter
        if sum(p.nbytes for p in group.values()) >= _BUCKET:
            yield groups.pop(parameter.dtype)
    yield from groups.values()
