"""Augmented and mixed batches follow from (seed, epoch, sample index), whatever reads them."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import center_crop, pil_to_tensor, resize, to_pil_image

from ddptrain.api.recipe import Progress
from ddptrain.api.rng import derive_seed
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.generators import seed_all
from ddptrain.data.images.augment import Augment
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.folder import ImageFolder
from ddptrain.data.images.mixing import Mix, mixed_pixels
from ddptrain.data.images.shapes import Shapes
from ddptrain.data.images.source import ArraySplit, ImageSource
from ddptrain.data.images.transforms import ImageTransform, RandomResizedCrop, Transforms
from ddptrain.data.pipeline import Samples
from ddptrain.data.workers import Key
from ddptrain.errors import UserError
from ddptrain.recipes.image import ImageClassification

SEED, BATCH, STEPS = 9, 12, range(2, 7)
"""Five batches of 12 out of 50 samples reach over an epoch's end."""
Batches = list[tuple[Tensor, Tensor]]


class Noise(nn.Module):
    """A user's own, which draws from all three libraries' generators."""

    def forward(self, picture: Tensor) -> Tensor:
        noise = torch.randint(-20, 21, picture.shape) + random.randint(-9, 9) + np.random.randint(-9, 10)
        return (picture.int() + noise).clamp(0, 255).to(torch.uint8)


PLAIN = Transforms()
AUGMENTS: dict[str, Transforms | nn.Module] = {
    "resized crop": Transforms({}, RandomResizedCrop()),
    "flips": Transforms({"horizontal": v2.RandomHorizontalFlip(), "vertical": v2.RandomVerticalFlip()}),
    "jitter": Transforms({"jitter": v2.ColorJitter(0.4, 0.4, 0.4, 0.1)}),
    "trivial augment": Transforms({"policy": v2.TrivialAugmentWide()}),
    "rand augment": Transforms({"policy": v2.RandAugment(3, 12)}),
    "erasing": Transforms({"erasing": v2.RandomErasing()}),
    "mixup": Transforms(mix=Mix(1.0, 0)),
    "cutmix": Transforms(mix=Mix(0, 1.0)),
    "all": Transforms(
        {
            "horizontal": v2.RandomHorizontalFlip(),
            "off": None,
            "jitter": v2.ColorJitter(0.3),
            "policy": v2.TrivialAugmentWide(),
            "erasing": v2.RandomErasing(),
        },
        RandomResizedCrop(),
        Mix(),
    ),
    "one's own": Noise(),
    "torchvision's own": v2.AugMix(),
}


def prepared(
    augment: Augment | Transforms | nn.Module,
    workers: int = 0,
    resident: bool | Literal["auto"] = False,
    source: ImageSource | None = None,
    root: Path | None = None,
) -> ImageData:
    source = source or Shapes(train=50, valid=23)
    data = ImageData(source, augment, root=str(root), workers=workers, resident=resident)
    data.prepare(World(), seed=SEED)
    return data


def batches(data: ImageData, steps: range = STEPS, world_size: int = 1, rank: int = 0) -> Batches:
    sampler = Sampler(data.train_size, BATCH, SEED, rank=rank, world_size=world_size)
    return list(data.train_batches(sampler, steps))


def assert_equal(ones: Batches, others: Batches) -> None:
    for one, other in zip(ones, others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("all", "resized crop", "cutmix") else pytest.mark.long)
        for name in AUGMENTS
    ],
)
def test_ranks_and_where_the_steps_begin_change_no_bit(name: str) -> None:
    data = prepared(AUGMENTS[name])
    alone = batches(data)
    assert_equal(alone, batches(prepared(AUGMENTS[name], resident=True)))
    for world_size in (2, 3):
        ranks = [batches(data, STEPS, world_size, rank) for rank in range(world_size)]
        together = [tuple(map(torch.cat, zip(*parts, strict=True))) for parts in zip(*ranks, strict=True)]
        assert_equal(alone, together)  # type: ignore[arg-type]
    assert_equal(alone[2:], batches(prepared(AUGMENTS[name]), range(4, 7)))
    epochs = [data._ready.train.first(12, epoch) for epoch in (4, 5)]
    assert not torch.equal(epochs[0].image, epochs[1].image)


@pytest.mark.parametrize(
    ("name", "resident"),
    [
        pytest.param("all", True, marks=pytest.mark.long),
        ("all", False),
        pytest.param("one's own", False, marks=pytest.mark.long),
    ],
)
def test_workers_change_no_bit(name: str, resident: bool) -> None:
    assert_equal(
        batches(prepared(AUGMENTS[name])), batches(prepared(AUGMENTS[name], workers=2, resident=resident))
    )


def test_the_threads_of_a_process_change_no_bit() -> None:
    """A mean over a picture's pixels would be summed up in another order."""
    images = torch.randint(0, 256, (3, 700, 700, 3), dtype=torch.uint8)
    split = ArraySplit(images, torch.zeros(3, dtype=torch.int64))
    augment = Transforms({"jitter": v2.ColorJitter(0.4, 0.9, 0.4, 0.1)})
    samples = Samples(split, ImageTransform(augment), seed=0)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            batch = samples.batch([Key(0, 0), Key(0, 1), Key(1, 2)])
            assert torch.get_num_threads() == count
            found.append(batch.image)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_validation_is_not_augmented() -> None:
    chunks = [range(10), range(20, 23)]
    plain = list(prepared(Augment(), resident=True).valid_batches(chunks))
    for resident in (True, False):
        assert_equal(plain, list(prepared(AUGMENTS["all"], resident=resident).valid_batches(chunks)))


@pytest.mark.parametrize("mix", [Mix(1.0, 0), Mix(0, 1.0), Mix(0.2, 1.0)])
def test_a_partner_is_augmented_as_it_is_as_a_sample_of_its_own(mix: Mix) -> None:
    parts = {"erasing": v2.RandomErasing()}, RandomResizedCrop()
    unmixed, mixed = prepared(Transforms(*parts)), prepared(Transforms(*parts, mix))
    images, labels = unmixed._ready.train.first(50, epoch=3)
    found, targets = mixed._ready.train.first(50, epoch=3)
    assert targets.dtype == torch.float32
    assert targets.shape == (50, 10)
    for i in range(50):
        mixture = mix.mixture(SEED, 3, i, range(50), 32, 32)
        assert torch.equal(found[i], mixed_pixels(images[i], images[mixture.partner], mixture))
        row = torch.zeros(10)
        row[labels[i]] += mixture.share
        row[labels[mixture.partner]] += 1 - mixture.share
        torch.testing.assert_close(targets[i], row)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_gradient_of_soft_targets_is_that_of_a_loop_over_samples_and_classes(
    label_smoothing: float,
) -> None:
    model = nn.Linear(6, 10).double()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(7, 6, generator=generator, dtype=torch.float64)
    targets = torch.rand(7, 10, generator=generator, dtype=torch.float64).softmax(dim=1)
    task = ImageClassification(nn.Identity, prepared(PLAIN), label_smoothing)
    progress = Progress(0, 0, 0.0)
    loss = task.loss(model, (images, targets), progress)
    assert loss.count == 7
    loss.sum.backward()
    found = model.weight.grad.clone()  # type: ignore[union-attr]
    model.zero_grad()
    for image, target in zip(images, targets, strict=True):
        logits = model(image)
        for k in range(10):
            share = (1 - label_smoothing) * target[k] + label_smoothing / 10
            (-share * (logits[k] - logits.exp().sum().log())).backward(retain_graph=True)
    torch.testing.assert_close(found, model.weight.grad)
    # a hard label is a target with one share
    hard = torch.tensor([0, 3, 2, 2, 4, 1, 0])
    both = (hard, functional.one_hot(hard, 10).double())
    whole = [task.loss(model, (images, labels), progress).sum for labels in both]
    torch.testing.assert_close(*whole)


def test_ones_own_draws_follow_from_the_sample_and_leave_the_generators_alone() -> None:
    data = prepared(Noise())
    keys = [Key(0, 5), Key(0, 5), Key(1, 5)]

    def seed(number: int) -> None:
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)

    seed(3)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    seed(3)
    seen = data._ready.train.batch(keys).image
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected
    seed(4)
    assert torch.equal(seen, data._ready.train.batch(keys).image)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


class Erases(nn.Module):
    def forward(self, picture: Tensor) -> Tensor:
        picture[:, 2:4] = 0
        return picture


@pytest.mark.parametrize("channels", [1, 3])
def test_ones_own_may_write_into_the_picture(channels: int) -> None:
    """It is not the set's."""
    images = torch.randint(1, 255, (3, 8, 8, channels), dtype=torch.uint8)
    before = images.clone()
    out = ImageTransform(Transforms({"own": Erases()}))(ArraySplit(images, torch.arange(3)), Key(0, 1)).image
    assert torch.equal(images, before)
    assert not out[2:4].any()
    assert torch.equal(out[4:], before[1, 4:])


class Halved(nn.Module):
    def forward(self, picture: Tensor) -> Tensor:
        return picture[:, ::2]


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (Halved(), r"augment \(Halved\) made torch\.uint8 \(3, 16, 32\)"),
        (v2.Grayscale(), r"augment \(Grayscale\) made torch\.uint8 \(1, 32, 32\)"),
    ],
)
def test_ones_own_must_give_a_picture_of_the_same_kind(module: nn.Module, found: str) -> None:
    with pytest.raises(UserError, match=rf"data\.augment: {found} of uint8 \(3, 32, 32\); it must give"):
        batches(prepared(module))


def test_preview_shows_what_epoch_0_trains_on_mixing_included() -> None:
    data = prepared(AUGMENTS["all"])
    assert data.preview().shape == (50, 3, 32, 32)
    seen = data._ready.train.first(50, epoch=0).image
    assert torch.equal(data.preview(), seen.permute(0, 3, 1, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of JPEGs of 60 to 90 x 100 pixels."""
    root = tmp_path_factory.mktemp("pictures")
    for part, count in (("train", 8), ("val", 3)):
        for label in range(2):
            (root / part / f"class{label}").mkdir(parents=True)
            for i in range(count):
                generator = torch.Generator().manual_seed(100 * label + i)
                coarse = torch.randint(0, 256, (3, 6, 8), generator=generator, dtype=torch.uint8)
                to_pil_image(resize(coarse, [60 + 4 * i, 100])).save(
                    root / part / f"class{label}" / f"{i}.jpg"
                )
    return root


def test_files_are_cropped_at_full_resolution_and_scaled_once(folder: Path) -> None:
    crop = RandomResizedCrop((0.1, 0.4))
    data = prepared(Transforms({}, crop), source=ImageFolder(40), root=folder)
    seen = data.preview()
    files = sorted((folder / "train").rglob("*.jpg"))
    for i, file in enumerate(files):
        picture = pil_to_tensor(Image.open(file))
        seed_all(derive_seed(SEED, 0, i, 8))
        box = crop.box(*picture.shape[1:])
        reference = v2.RandomResizedCrop(40).transform(picture, box._asdict())
        assert torch.equal(seen[i], reference)
    assert_equal(batches(data), batches(prepared(
        Transforms({}, crop), workers=2, source=ImageFolder(40), root=folder)))  # fmt: skip


def test_without_crops_files_are_what_they_were_and_may_lie_in_memory(folder: Path, tmp_path: Path) -> None:
    plain = prepared(Augment(), source=ImageFolder(24), root=folder)
    for cache, resident in ((None, False), (None, True), (str(tmp_path / "packed"), False)):
        data = prepared(PLAIN, resident=resident, source=ImageFolder(24, cache), root=folder)
        assert_equal(batches(plain), batches(data))
        assert_equal(list(plain.valid_batches([range(6)])), list(data.valid_batches([range(6)])))


def test_evaluation_resizes_the_short_side_and_cuts_the_middle_as_torchvision(
    folder: Path, tmp_path: Path
) -> None:
    plain = prepared(PLAIN, source=ImageFolder(24, resize=28), root=folder)
    packed = prepared(PLAIN, source=ImageFolder(24, str(tmp_path), 28), root=folder)
    found, _ = next(plain.valid_batches([range(6)]))
    assert torch.equal(found, next(packed.valid_batches([range(6)]))[0])
    files = sorted((folder / "val").rglob("*.jpg"))
    pictures = [pil_to_tensor(center_crop(resize(Image.open(file), [28]), [24, 24])) for file in files]
    expected = plain.normalised(torch.stack(pictures).permute(0, 2, 3, 1))
    assert torch.equal(found, expected)
    assert plain.metadata()["resize"] == 28
    recalled = ImageData(ImageFolder(24), PLAIN)
    recalled.load_metadata(plain.metadata(), World())
    assert recalled.resize == 28
    assert_equal(
        batches(plain), batches(prepared(PLAIN, source=ImageFolder(24), root=folder))
    )  # training does not follow it


REFUSED: list[tuple[Callable[[Path, Path], Any], str]] = [
    (lambda root, cache: prepared(AUGMENTS["all"], source=ImageFolder(24, str(cache)), root=root),
     r"data\.source\.cache: holds pictures that are cut and scaled already"),
    (lambda root, cache: prepared(AUGMENTS["all"], resident=True, source=ImageFolder(24), root=root),
     r"data\.resident=true: .* Set data\.resident=false"),
    (lambda root, cache: ImageFolder(24, resize=20),
     r"data\.source\.resize=20: must be data\.source\.size=24"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_does_not_go_together_names_its_keys(
    make: Callable[[Path, Path], Any], message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        make(folder, tmp_path / "packed")


def test_a_broken_file_is_one_message(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "pictures"
    shutil.copytree(folder, root)
    (root / "train/class0/3.jpg").write_bytes(b"no picture")
    data = prepared(AUGMENTS["all"], workers=2, source=ImageFolder(24), root=root)
    with pytest.raises(UserError, match=r"class0/3\.jpg: can't be read as an image"):
        batches(data)
