"""What goes to a GPU can be pinned on its way there, and copied from there as it lies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from composed import made
from torch.nn.utils.rnn import pack_sequence
from torch.overrides import TorchFunctionMode

from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data import prefetch
from ddptrain.engine.seeding import StepSeed

KINDS = {
    "images in files": ("cnn_cifar10", "data.resident=false"),
    "images in files, not varied": ("cnn_cifar10", "data.resident=false data.augment.crop=0"),
    "images, mixed": ("cnn_cifar10", "augment=strong"),
    "images on the device": ("cnn_cifar10", "data.resident=true"),
    "detection": ("yolo_shapes", ""),
    "detection, decoded each time": ("yolo_shapes", "data.resident=false data.augment.mosaic=0"),
    "masks": ("segmentation", ""),
    "streams of text": ("lstm_text", ""),
    "windows of text": ("transformer_text", ""),
    "dates": ("transformer_translate", ""),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_batch_can_be_pinned(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, changes = KINDS[kind]
    _, _, data = made(recipe, tmp_path, *changes.split())
    sent: list[torch.Tensor] = []
    move = prefetch.to_device

    def watched(batch: object, device: torch.device) -> object:
        sent.extend(prefetch.tensors_of(batch))
        return move(batch, device)

    monkeypatch.setattr(prefetch, "to_device", watched)
    sampler = Sampler(data.train_size, 4, seed=0)
    for batch in (*data.train_batches(sampler, range(2)), *data.valid_batches([range(3), range(3, 4)])):
        sent.extend(prefetch.tensors_of(batch))
    assert sent
    for tensor in sent:
        # as pin_memory does it: fails where two elements are one place in memory
        torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).copy_(tensor)
        # with gaps it would be packed before the copy, in memory that is not pinned: the host would wait
        assert torch.empty_like(tensor).stride() == tensor.stride(), (tensor.shape, tensor.stride())


class Copies(TorchFunctionMode):
    """Notes of each `Tensor.to` whether the host goes on before it has arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.unwaited: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.to:
            self.unwaited.append(kwargs.get("non_blocking", False))
        return func(*args, **kwargs)


def test_the_host_waits_for_copies_to_what_is_no_cuda_device() -> None:
    """Metal may read pageable memory that was freed meanwhile (pytorch#139550)."""
    meta = torch.device("meta")
    with Copies() as copies:
        prefetch.to_device({"a": torch.ones(3), "b": [torch.ones(2)]}, meta)
        list(Sampler(10, 4, seed=0).samples(range(4), meta))
    assert len(copies.unwaited) >= 4
    assert not any(copies.unwaited)


def test_each_step_seeds_metals_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metal is not to be had here: what would be called."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.mps, "manual_seed", seeds.append)
    seed = StepSeed(3, World(device=torch.device("mps", 0)))
    for step, stream in ((0, 0), (1, 0), (0, 0), (0, 1)):
        seed(step, stream)
    assert seeds[0] == seeds[2]
    assert len(set(seeds)) == 3


def test_sizes_of_a_packed_sequence_stay_on_the_cpu() -> None:
    packed = pack_sequence([torch.zeros(2, 3), torch.zeros(4, 3)], enforce_sorted=False)
    (moved, _) = prefetch.to_device((packed, torch.zeros(2)), torch.device("meta"))
    assert type(moved) is type(packed)
    assert moved.data.device == moved.sorted_indices.device == torch.device("meta")
    assert torch.equal(moved.batch_sizes, packed.batch_sizes)
    assert {tensor.device.type for tensor in prefetch.tensors_of(moved)} == {"meta"}
