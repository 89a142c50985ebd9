"""Small models that are legal in PyTorch, each with something that trips a trainer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from toy import CLASSES, FEATURES

WIDTH = 16


class Head(nn.Module):
    """What all have in common: the first and the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def middle(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.middle(torch.tanh(self.first(x))))
        return logits


class Tied(Head):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.tanh(self.up(x))))


class Shared(Head):
    """One module used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.again = self.layer

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.again(torch.tanh(self.layer(x))))


class Unused(Head):
    """A layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, 3)


class UnusedLast(Head):
    """The same, last in the order of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.zz_spare = nn.Linear(WIDTH, 3)


class SometimesUnused(Head):
    """A layer that only every second forward pass in training calls."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.calls: Tensor

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x + self.extra(x) if int(self.calls) % 2 else x


class UsedByData(Head):
    """A layer that a batch calls or not, as its first sample says: ranks differ."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 0.5
        if not bool(chosen.any()):
            return x
        return x.index_add(0, chosen.nonzero()[:, 0], self.extra(x[chosen]))


class Frozen(Head):
    """Some parameters want no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Lazy(Head):
    """A layer whose size is known after the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Complex(Head):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def middle(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH)


class SometimesComplex(SometimesUnused):
    """A complex parameter from the second forward pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        x = x + self.extra(x)
        return x if int(self.calls) % 3 == 1 else torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH)


class SparseBuffer(Head):
    """A graph's adjacency matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(WIDTH).to_sparse())
        self.adjacency: Tensor

    def middle(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.sparse.mm(self.adjacency, x.float().t()).t()


class ExpandedBuffer(Head):
    """A buffer whose rows lie in one place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.linspace(0, 1, WIDTH).expand(3, WIDTH))
        self.mask: Tensor

    def middle(self, x: Tensor) -> Tensor:
        return x * self.mask.sum(0)


class Sparse(Head):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH, sparse=True)

    def middle(self, x: Tensor) -> Tensor:
        found: Tensor = self.table((x[:, 0] * 24 + 25).long().clamp(0, 49))
        return x + found


class CachedAttribute(Head):
    """A tensor made in the first forward pass and kept: a rotary table, a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def middle(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < len(x):
            self.table = torch.linspace(0, 1, max(len(x), 1), device=x.device)[:, None].cos()
        return x * (1 + 0 * self.table[: len(x)])


class CachedBuffer(Head):
    """The same as a buffer, made anew when it is too small."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)
        self.table: Tensor | None

    def middle(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < len(x):
            self.table = torch.ones(len(x), 1, device=x.device)
        return x * self.table[: len(x)]


class ReplacedBuffer(Head):
    """A running mean that is another tensor after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1
        return x - self.mean


class ExtraState(Head):
    """State that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def middle(self, x: Tensor) -> Tensor:
        return x

    def get_extra_state(self) -> dict[str, Any]:
        return {"version": 3, "names": ["a", "b"]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state == {"version": 3, "names": ["a", "b"]}


class IntegerBuffers(Head):
    """Buffers of whole numbers and truth values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.randperm(WIDTH))
        self.register_buffer("mask", torch.arange(WIDTH) % 3 > 0)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.places: Tensor
        self.mask: Tensor
        self.seen: Tensor

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return x[:, self.places] * self.mask


class ZeroElements(Head):
    """A parameter without numbers, used and not."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.nothing])


class Scalars(Head):
    """0-d parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.shift = nn.Parameter(torch.tensor(0.0))

    def middle(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class OwnGroup(Head):
    """Sums something over ranks by itself, in a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        several = dist.is_available() and dist.is_initialized()
        self.group = dist.new_group() if several else None
        self.register_buffer("count", torch.zeros(1))
        self.count: Tensor

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            size = torch.tensor([float(len(x))], device=x.device)
            if self.group is not None:
                dist.all_reduce(size, group=self.group)
            self.count += size
        return x


class Doubled(torch.autograd.Function):
    """A forward and backward pass of one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * given + 0 * x


class CustomFunction(Head):
    def middle(self, x: Tensor) -> Tensor:
        out: Tensor = Doubled.apply(x)
        return out


class InPlace(Head):
    """Activations and views that are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y += x
        y[:, : WIDTH // 2].mul_(0.5)
        return torch.relu_(y)


class ChangingShapes(Head):
    """The width of an activation follows from the data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH) / WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        width = 4 + int(x.detach().abs().sum() * 1000) % (WIDTH - 4)
        return x + 0 * (x[:, :width] @ self.weight[:width])[:, None]


class Mixed(Head):
    """Parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def middle(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return torch.tanh(self.fine(x.double()).to(x.dtype))


class Transposed(Head):
    """A parameter with gaps in its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(WIDTH, 2 * WIDTH) / WIDTH).t()[::2])

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class Lists(Head):
    """Parameters in lists and dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.some = nn.ParameterList([torch.randn(WIDTH) for _ in range(3)])
        self.named = nn.ParameterDict({"a": torch.ones(WIDTH)})

    def middle(self, x: Tensor) -> Tensor:
        for scale in [*self.some, *self.named.values()]:
            x = x + 0.1 * torch.tanh(x * scale)
        return x


class OddNames(Head):
    """Names that a wrapper uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.flags = nn.Linear(WIDTH, WIDTH)
        self.model = nn.Linear(WIDTH, WIDTH)
        self.module = nn.Linear(WIDTH, WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.module(self.model(self.flags(x))))


class Recurrent(Head):
    """An LSTM over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def middle(self, x: Tensor) -> Tensor:
        return self.lstm(x.view(len(x), 4, 4))[0].flatten(1)  # type: ignore[no-any-return]


class Checkpointed(Head):
    """Activations that the backward pass computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)  # type: ignore[no-any-return]


class Parametrized(Head):
    """weight -> a function of another parameter."""

    def __init__(self, wrap: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.layer = wrap(nn.Linear(WIDTH, WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


@dataclass(frozen=True)
class Animal:
    """One of the zoo."""

    make: Callable[[], nn.Module]
    strategy: Mapping[str, Any] = field(default_factory=dict)
    """What it needs of ddp."""
    refused: str = ""
    """In the message, where it can't be trained at all."""
    refused_by_ddp: str = ""
    refused_by_ranks: str = ""
    """By several."""
    parameters_only: bool = False
    """Its buffers follow from who computed what."""


ANY = {"find_unused_parameters": True}
ZOO: dict[str, Animal] = {
    "plain": Animal(Head),
    "tied weights": Animal(Tied),
    "module used twice": Animal(Shared),
    "unused layer": Animal(Unused, ANY),
    "unused last layer": Animal(UnusedLast, ANY),
    "layer used in some steps": Animal(SometimesUnused, ANY),
    "layer used for some data": Animal(UsedByData, ANY),
    "frozen layer": Animal(Frozen),
    "lazy layer": Animal(Lazy, refused="layer.weight is lazy"),
    "complex parameter": Animal(Complex),
    "complex parameter used in some steps": Animal(SometimesComplex, ANY),
    "expanded buffer": Animal(ExpandedBuffer),
    "sparse buffer": Animal(SparseBuffer, refused_by_ranks="buffer adjacency is sparse"),
    "nothing to train": Animal(
        lambda: Head().requires_grad_(False), refused="no parameter requires a gradient"
    ),
    "sparse gradients": Animal(Sparse, refused_by_ddp="table of the model has sparse=True"),
    "tensor cached in forward": Animal(CachedAttribute),
    "buffer cached in forward": Animal(CachedBuffer),
    "buffer replaced in forward": Animal(ReplacedBuffer),
    "extra state": Animal(ExtraState),
    "integer buffers": Animal(IntegerBuffers),
    "parameter without elements": Animal(ZeroElements),
    "0-d parameters": Animal(Scalars),
    "process group of its own": Animal(OwnGroup, parameters_only=True),
    "custom autograd function": Animal(CustomFunction),
    "in-place operations": Animal(InPlace),
    "shapes that change": Animal(ChangingShapes),
    "two dtypes": Animal(Mixed),
    "parameter not contiguous": Animal(Transposed),
    "parameter lists and dicts": Animal(Lists),
    "names a wrapper uses": Animal(OddNames),
    "LSTM": Animal(Recurrent),
    "activation checkpointing": Animal(Checkpointed),
    "orthogonal parametrization": Animal(lambda: Parametrized(parametrizations.orthogonal)),
    "weight norm": Animal(lambda: Parametrized(parametrizations.weight_norm)),
    "spectral norm": Animal(lambda: Parametrized(parametrizations.spectral_norm), parameters_only=True),
}
