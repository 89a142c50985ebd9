"""Streamed pictures with boxes and with masks: what the files have, sample by sample."""

from pathlib import Path

import pytest
import torch
from masked import CLASSES, mask_set
from named_sets import TRAINED, image_data, in_folders

from ddptrain.api.blocks import Blocks
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.detection.augment import DetectionAugment
from ddptrain.data.detection.data import DetectionData
from ddptrain.data.detection.drawn import DrawnScenes
from ddptrain.data.images.folder import ImageFolder
from ddptrain.data.masks.data import MaskData
from ddptrain.data.stream.boxes import StreamBoxes
from ddptrain.data.stream.images import StreamImages
from ddptrain.data.stream.masks import StreamMasks
from ddptrain.data.stream.text import StreamText
from ddptrain.data.text.corpus import TextFiles
from ddptrain.data.text.data import TextData
from ddptrain.errors import UserError


@pytest.fixture
def drawn() -> DrawnScenes:
    return DrawnScenes(train=40, valid=12, size=64)


@pytest.mark.long
def test_boxes_are_those_of_the_set_in_the_order_of_the_blocks(drawn: DrawnScenes, tmp_path: Path) -> None:
    list(DetectionData(drawn, DetectionAugment(), size=64).write(tmp_path / "set", "stream", 0.02))
    opened = drawn.open(tmp_path)
    source = StreamBoxes(str(tmp_path / "set"), cache=str(tmp_path / "cache"), shuffle_blocks=3)
    source.fetch(tmp_path)
    streamed = source.open(tmp_path)
    assert tuple(streamed.classes) == tuple(opened.classes)
    for ours, theirs in ((streamed.train, opened.train), (streamed.valid, opened.valid)):
        pixels = {theirs.image(i).numpy().tobytes(): i for i in range(len(theirs))}
        places = [pixels[ours.image(i).numpy().tobytes()] for i in range(len(ours))]
        assert sorted(places) == list(range(len(theirs)))
        assert places != sorted(places)
        for i, place in enumerate(places):
            found, expected = ours.objects[i], theirs.objects[place]
            assert torch.equal(found.boxes, expected.boxes)
            assert torch.equal(found.labels, expected.labels)
            assert torch.equal(found.crowd, expected.crowd)


@pytest.mark.parametrize("workers", [0, 2])
def test_mosaics_are_made_of_what_is_at_hand(drawn: DrawnScenes, tmp_path: Path, workers: int) -> None:
    """Of a block's pictures; the batches don't depend on ranks and workers."""
    list(DetectionData(drawn, DetectionAugment(), size=64).write(tmp_path / "set", "stream", 0.02))

    def batches(cache: str | None, workers: int, ranks: int) -> list[torch.Tensor]:
        source = StreamBoxes(str(tmp_path / "set"), cache=cache, shuffle_blocks=3, cache_gb=1e-3)
        data = DetectionData(source, DetectionAugment(mosaic=1.0), size=64, resident=False, workers=workers)
        data.prepare(World(), seed=5)
        found = [
            [
                batch.images
                for batch in data.train_batches(
                    Sampler(data.train_size, 8, 5, rank, ranks, epoch_order=data.epoch_order), range(6)
                )
            ]
            for rank in range(ranks)
        ]
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    expected = batches(None, 0, 1)
    for found, other in zip(batches(str(tmp_path / "cache"), workers, 2), expected, strict=True):
        assert torch.equal(found, other)


def test_masks_are_those_of_the_files(tmp_path: Path) -> None:
    root = mask_set(tmp_path / "files")
    files = MaskData(str(root), size=64)
    list(files.write(tmp_path / "set", "stream", 0.002))
    files.prepare(World(), seed=5)
    source = StreamMasks(str(tmp_path / "set"), cache=str(tmp_path / "cache"), shuffle_blocks=2)
    streamed = MaskData(size=64, source=source)
    streamed.prepare(World(), seed=5)
    assert streamed.classes == CLASSES
    assert isinstance(streamed.epoch_order, Blocks)
    samples = zip(*files.valid_samples(4), strict=True)
    expected = {picture.numpy().tobytes(): mask for picture, mask in samples}
    for picture, mask in zip(*streamed.valid_samples(4), strict=True):
        assert torch.equal(mask, expected[picture.numpy().tobytes()])
    batches = list(streamed.train_batches(Sampler(12, 4, 5, epoch_order=streamed.epoch_order), range(3)))
    assert len({picture.numpy().tobytes() for pictures, _ in batches for picture in pictures}) == 12


def test_each_kind_says_where_the_others_belong(drawn: DrawnScenes, tmp_path: Path) -> None:
    """Another program's set, which knows no kind, among them."""
    list(DetectionData(drawn, DetectionAugment(), size=64).write(tmp_path / "set", "stream"))
    classes = image_data(ImageFolder(8), in_folders(tmp_path / "folders", TRAINED, TRAINED))
    list(classes.write(tmp_path / "classes", "stream"))
    (index,) = (tmp_path / "classes").rglob("valid/index.json")
    mixed = StreamBoxes(str(tmp_path / "set"), valid_url=str(index.parent), cache=str(tmp_path / "c"))
    mixed.fetch(tmp_path)
    with pytest.raises(UserError, match=r"valid_url=.*valid: holds a set of another program, not of boxes"):
        mixed.open(tmp_path)
    with pytest.raises(UserError, match="holds a set of boxes, not of masks"):
        MaskData(source=StreamMasks(str(tmp_path / "set"), cache=str(tmp_path / "c"))).prepare(World(), 0)
    (tmp_path / "text").write_text("a few words\n" * 400)
    list(TextData(TextFiles(str(tmp_path / "text"))).write(tmp_path / "tokens"))
    tokens = TextData(StreamText(str(tmp_path / "tokens"), str(index.parent), str(tmp_path / "c")))
    with pytest.raises(UserError, match=r"valid_url=.*valid: holds a set of another program, not of tokens"):
        tokens.prepare(World(), 0)
    for other in ("set", "tokens"):
        images = StreamImages(str(index.parent), str(tmp_path / other), 2, cache=str(tmp_path / "c"))
        images.fetch(tmp_path)
        with pytest.raises(UserError, match=rf"valid_url=.*{other}: holds a set of .*, not of classes"):
            images.open(tmp_path)
