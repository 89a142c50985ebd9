"""Tensors in memory as a recipe's data: row i of each belongs to sample i."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ddptrain.api.recipe import Data, Loading
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data import held_out
from ddptrain.data.identity import digest, of_tensor
from ddptrain.data.prefetch import on_device
from ddptrain.distributed.comm import once_a_node
from ddptrain.errors import UserError

Tensors = tuple[Tensor, ...]


class _Prepared(NamedTuple):
    """Both parts, on the device."""

    train: Tensors
    valid: Tensors
    device: torch.device
    identity: str


@final
class TensorData(Data):
    """Batches ``(*inputs, target)`` of rows of these tensors, which lie on the device.

    train: any dtypes, with as many rows each. valid: as many tensors; without it every tenth row of ``train``
    is held out. each_rank: whether each rank has made its own, as a script does under torchrun: then they are
    compared; else one of a node is hashed. classes: names of what the targets count, where they have some.
    """

    def __init__(
        self,
        train: Tensors,
        valid: Tensors | None = None,
        each_rank: bool = False,
        classes: Sequence[str] = (),
    ) -> None:
        for key, tensors in (("train", train), ("valid", valid)):
            if tensors is None:
                continue
            if len({len(tensor) for tensor in tensors}) != 1:
                sizes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
                raise UserError(
                    f"{key}: tensors of shapes {sizes}; all need as many rows, one for each sample."
                )
        if valid is not None and len(valid) != len(train):
            raise UserError(f"valid: {len(valid)} tensors, and train has {len(train)}; give as many.")
        self._train = train
        self._valid = valid
        self._each_rank = each_rank
        self._classes = tuple(classes)
        self._prepared: _Prepared | None = None

    def prepare(self, world: World, seed: int) -> None:
        train, valid = self._train, self._valid
        if valid is None:
            rows, valid_rows = held_out.split(range(len(train[0])))
            train, valid = tuple(t[rows] for t in self._train), tuple(t[valid_rows] for t in self._train)
        parts = train, valid

        def hashed() -> str:
            return digest(of_tensor(t) for part in parts for t in part)

        identity = hashed() if self._each_rank else once_a_node(world, hashed)
        train, valid = (tuple(t.to(world.device) for t in part) for part in parts)
        self._prepared = _Prepared(train, valid, world.device, identity)

    @property
    def _ready(self) -> _Prepared:
        assert self._prepared is not None, "prepare comes first"
        return self._prepared

    @property
    def train_size(self) -> int:
        return len(self._ready.train[0])

    @property
    def valid_size(self) -> int:
        return len(self._ready.valid[0])

    @property
    def identity(self) -> str:
        return self._ready.identity

    @property
    def outputs(self) -> Sequence[str]:
        return self._classes

    def metadata(self) -> Mapping[str, Any]:
        return {"tensors": len(self._train)}

    def load_metadata(self, metadata: Mapping[str, Any], world: World) -> None:
        """A model is loaded without them."""

    @property
    def loading(self) -> Loading:
        return Loading(resident=True)

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Tensors]:
        ready = self._ready
        rows = (ids for ids, _ in sampler.samples(steps, ready.device))
        return on_device((tuple(t[ids] for t in ready.train) for ids in rows), ready.device)

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Tensors]:
        valid = self._ready.valid
        for chunk in chunks:
            # not a view: what a model does to its input would be done to the set
            yield tuple(t[chunk.start : chunk.stop].clone() for t in valid)

    def preview(self) -> Tensor | None:
        return None

    def describe(self) -> str:
        shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape[1:])}" for t in self._train)
        sizes = f"{self.train_size:,} train, {self.valid_size:,} valid"
        return f"tensors ({shapes}): {sizes}, on {self._ready.device}"
