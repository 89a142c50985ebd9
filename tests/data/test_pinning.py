"""What goes to a GPU can be pinned on its way there, and copied from there as it lies."""

from pathlib import Path

import pytest
import torch
from composed import made

from ddptrain.api.sampler import Sampler
from ddptrain.data import prefetch

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
