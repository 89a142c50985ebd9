"""How one model is spread over devices. Subclass `Strategy` for another one."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddptrain.api.world import World


class Flags:
    """What each rank tells the others in every step, as two numbers: whether it wants to stop, and which step
    it is at. Both are NaN if its loss is not finite. Ranks receive the mean of all.

    like: gives device and dtype. exact: whether the mean is exact; otherwise steps are not compared.
    """

    _CYCLE = 4
    """Steps are compared modulo this: small, so that the mean over a thousand ranks is still precise
    enough."""

    def __init__(self, like: Tensor, exact: bool = True) -> None:
        self._cycle = self._CYCLE if exact and like.dtype in (torch.float32, torch.float64) else 1
        self._on_host = like.device.type == "cpu"
        # all possible values, made once on the device: a step selects one without a copy
        self._rows = [
            [torch.tensor([stop, step]).to(like) for step in range(self._cycle)] for stop in (0.0, 1.0)
        ]
        self._nan = torch.full((2,), math.nan).to(like)
        self.captured: Tensor | None = None
        """While a step is captured in a CUDA graph: (2,), into which each replay is given `numbers`."""

    def like(self, numbers: Tensor) -> Tensor:
        """(2,): as flags are."""
        return numbers.to(self._nan)

    def numbers(self, step: int, stop: bool) -> tuple[float, float]:
        """What this rank tells of a step whose loss is finite."""
        return float(stop), float(step % self._cycle)

    def row(self, step: int, stop: bool, loss: Tensor) -> Tensor:
        """(2,): this rank's flags. loss: 0-d. Never waits for the device."""
        row = self._rows[stop][step % self._cycle] if self.captured is None else self.captured
        if self._on_host:
            return row if math.isfinite(loss.item()) else self._nan
        return row + (loss.detach() * 0).to(row.dtype)

    def same_step(self, mean: float, step: int, world_size: int) -> bool:
        """Whether all ranks are at this rank's step, by the mean of the second number."""
        return abs(mean - step % self._cycle) < 0.5 / world_size


class Strategy(ABC):
    """Everything that depends on how the model is spread: wrapping, accumulation, the sum over ranks, the
    gradient norm, the flags that ranks exchange, and what a checkpoint holds.

    The engine never asks for a strategy's type. A config names it by ``strategy._target_``; its other
    arguments are the constructor's, which is also given the `World`.
    """

    shards: int | None = None
    """Fixed parts of each global batch, each with its own backward pass; None: one per rank."""
    sharded = False
    """Whether a rank holds its part only of weights, gradients and optimizer. The model is then made on the
    first rank's host, of whose numbers `wrap` gives each rank its part; others may have it on the device
    `meta`. Each pass of it is a collective, and all ranks need equally many."""
    takes_sparse_gradients = True
    why_not_captured = ""
    """Why its steps can't be captured in a CUDA graph; '' where they can."""
    times_waits = False
    """Whether a rank's waits for others are phases of their own (`time_waits`)."""
    needs_all_gradients = False
    """Whether ranks wait for a gradient of every parameter in every step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._flags: Flags | None = None
        """Set by `wrap`, or made when first used."""
        self._own_flags: Tensor | None = None

    @abstractmethod
    def describe(self) -> str:
        """One line for the log."""

    @abstractmethod
    def accumulate(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
        """A context around forward and backward pass of a micro-batch. At the end of the ``last`` one of a
        shard (or of this rank's share) gradients are summed over ranks; the others must not communicate."""

    def check(self, compiled: bool) -> None:  # noqa: B027 # most fit everywhere
        """Raise UserError if it does not fit its world, or a model that is ``compiled``."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """Change the model itself, before it is compiled and wrapped (SyncBatchNorm)."""
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module to call in training; the model keeps the weights. Before the optimizer is made, so that
        parameters may be replaced."""
        return model

    @property
    def averages_over(self) -> int:
        """The number by which the sum of the ranks' gradients is divided in the all-reduce."""
        return 1

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scale all gradients together to a 2-norm of at most ``max_norm``; their norm before, 0-d."""
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's numbers of a parameter or of its gradient, as a plain tensor over the same memory."""
        return tensor

    def add_up_nonfinite(self, nonfinite: Tensor) -> None:  # noqa: B027 # the same everywhere, if not sharded
        """Make ``nonfinite`` (0-d) not 0 on all ranks if it is not 0 on any, in place. A collective."""

    def evaluating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Around evaluations: inside, each rank can use the model by itself. May be a collective."""
        return nullcontext()

    def send_flags(
        self, wrapped: nn.Module, step: int, stop: bool, loss: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Send this rank's flags, after a shard's forward pass. Returns a parameter and its gradient, as one
        more root of the backward pass that sums gradients; None if they are sent in `receive_flags`."""
        if self.world.size > 1:
            self._own_flags = self.flags.row(step, stop, loss)
        return None

    def receive_flags(self, wrapped: nn.Module) -> Tensor | None:
        """(2,): the mean of all ranks' flags, after the backward pass; None in a world of one. This default
        is a separate collective."""
        own, self._own_flags = self._own_flags, None
        if self.world.size == 1:
            return None
        assert own is not None
        total = own.clone()
        dist.all_reduce(total)
        return total / self.world.size

    def same_step(self, mean: float, step: int) -> bool:
        """Whether all ranks are at this step, by the mean of the second flag."""
        return self.flags.same_step(mean, step, self.world.size)

    @property
    def flags(self) -> Flags:
        if self._flags is None:
            self._flags = Flags(torch.zeros((), device=self.world.device))
        return self._flags

    def compiled_parts(self, model: nn.Module) -> Sequence[nn.Module]:
        """What ``compile`` compiles of a model that is not wrapped yet, each by itself."""
        return [model]

    def warm_up_passes(self, compiled: bool) -> int:
        """The number of forward and backward passes before the first step whose results are discarded: for
        compiling, or until gradients are summed in their final order."""
        return int(compiled)

    def time_waits(self, wrapped: nn.Module, mark: Callable[[str], None]) -> None:  # noqa: B027
        """From now on call ``mark("backward")`` when a rank's own backward pass ends and waiting for others
        begins, and likewise for other phases."""

    @property
    def further_gpus(self) -> Sequence[int]:
        """Indices of the GPUs that this process uses beside its own."""
        return ()

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state_dict as a checkpoint holds it: its tensors complete, on rank 0, or DTensors, of which each
        rank writes its part. Called on all ranks, so it may be a collective."""
        return state

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor to read a saved one into: complete and on the CPU, or this rank's part of it."""
        return torch.empty(shape, dtype=dtype)

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """What this rank keeps of a complete tensor, in the form of ``like``, of the same shape."""
        return whole
