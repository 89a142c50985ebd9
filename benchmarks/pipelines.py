"""Samples per second that one core brings into batches: torchvision's Compose in a DataLoader, and ddptrain's
loading paths.

    python benchmarks/pipelines.py                      # two Markdown tables on stdout, in some 3 minutes
    python benchmarks/pipelines.py --write docs/performance.md    # and into that file
    python benchmarks/pipelines.py --rounds 3

All crop out of a padded picture, mirror half of them and normalise; a batch ends as float32 in memory, and
nothing is trained. Chunks of all take turns within one process on one core, in both directions, and a ratio
is taken within one round. That ddptrain's paths give the same bits is checked before anything is timed.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import compute_alone_on, made_with, publish, rounds_parser
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder as TorchvisionFolder
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.images.augment import Augment
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.folder import ImageFolder
from ddptrain.data.images.source import ArraySplit, ImageSet, ImageSource

NAME = "pipelines"
"""Of the markers."""
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
ENDLESS = range(10**6)
"""Steps."""

Batches = Callable[[], Iterator[Any]]
"""Begins to bring batches."""


class Pipeline(NamedTuple):
    """samples: of a chunk, of the fast ones more, so that a chunk of each can be timed."""

    title: str
    batches: Batches
    samples: int


class Pictures(Dataset[Any]):
    """PIL images in memory, as torchvision's own sets give them to a transform."""

    def __init__(self, images: Tensor, labels: Tensor, transform: Callable[[Any], Any]) -> None:
        self._pictures = [to_pil_image(image.permute(2, 0, 1)) for image in images]
        self._labels = labels.tolist()
        self._transform = transform

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._transform(self._pictures[index]), self._labels[index]


class InMemory(ImageSource):
    """Images that are there."""

    name = "in memory"

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._split = ArraySplit(images, labels)

    def fetch(self, root: Path) -> None: ...

    def open(self, root: Path) -> ImageSet:
        middle, spread = ([255 * value for value in of] for of in (MEAN, STD))
        return ImageSet(self._split, self._split, ["a", "b"], middle, spread)


def main() -> None:
    arguments = rounds_parser(__doc__, NAME, 40).parse_args()
    compute_alone_on(1)
    with tempfile.TemporaryDirectory() as folder:
        lines = _measured("32 x 32, batches of 128", small(), 128, arguments.rounds)
        root = Path(folder) / "pictures"
        size = write_jpegs(root)
        title = f"JPEGs of 500 x 375 ({size / 1000:.0f} kB) to 224 x 224, batches of 32"
        lines += ["", *_measured(title, jpegs(root, Path(folder) / "packed"), 32, arguments.rounds)]
    publish("\n".join([*lines, "", _note(arguments.rounds)]), NAME, arguments.write)


def small(count: int = 20_000) -> list[Pipeline]:
    """Pipelines over images of CIFAR-10's form; the first is what the others are held beside."""
    images = torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8)
    labels = torch.arange(count) % 2
    resident, files = (ours(InMemory(images, labels), 4, 128, resident=here) for here in (True, False))
    check_equal(resident, files)
    first, second = (
        composed(Pictures(images[:4096], labels[:4096], transform), 128)
        for transform in (_compose_v1(4, 32), _compose_v2(4, 32))
    )
    return [
        Pipeline("torchvision's Compose (v1), DataLoader", first, 2048),
        Pipeline("torchvision's Compose (v2), DataLoader", second, 2048),
        Pipeline("**ddptrain**, as a worker reads files", files, 8192),
        Pipeline("**ddptrain**, resident", resident, 32_768),
    ]


def jpegs(root: Path, cache: Path) -> list[Pipeline]:
    """Pipelines over a folder of JPEGs; the first is what the others are held beside."""
    decoding = ours(ImageFolder(224), 28, 32, resident=False, root=root)
    packed = ours(ImageFolder(224, str(cache)), 28, 32, resident=False, root=root)
    resident = ours(ImageFolder(224), 28, 32, resident=True, root=root)
    check_equal(decoding, packed)
    check_equal(decoding, resident)
    transform = v2.Compose([v2.Resize(224), v2.CenterCrop(224), _compose_v1(28, 224)])
    return [
        Pipeline("**ddptrain**, decoding", decoding, 128),
        Pipeline(
            "torchvision's ImageFolder and Compose (v1), DataLoader",
            composed(TorchvisionFolder(str(root), transform), 32),
            128,
        ),
        Pipeline("**ddptrain**, packed (`data.source.cache`)", packed, 1024),
        Pipeline("**ddptrain**, resident", resident, 1024),
    ]


def ours(source: ImageSource, crop: int, batch: int, resident: bool, root: Path = Path()) -> Batches:
    """ddptrain's loading path, as its configs build it, without workers: all on this core."""
    data = ImageData(source, Augment(crop, horizontal_flip=True), str(root), workers=0, resident=resident)
    data.prepare(World(), seed=0)
    return lambda: data.train_batches(Sampler(data.train_size, batch, seed=0), ENDLESS)


def composed(pictures: Dataset[Any], batch: int) -> Batches:
    def begin() -> Iterator[Any]:
        while True:
            yield from DataLoader(pictures, batch, shuffle=True, drop_last=True)

    return begin


def check_equal(one: Batches, other: Batches) -> None:
    for ours, theirs in islice(zip(one(), other(), strict=True), 3):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), "other bits"


def write_jpegs(root: Path, count: int = 288) -> float:
    """Smooth shapes with noise on them, in two classes. Returns the mean of their bytes."""
    generator = torch.Generator().manual_seed(0)
    for i in range(count):
        coarse = torch.rand(1, 3, 12, 16, generator=generator)
        shapes = torch.nn.functional.interpolate(coarse, (375, 500), mode="bicubic")[0]
        noise = torch.randn(3, 375, 500, generator=generator)
        picture = to_pil_image(((shapes * 255 + 8 * noise).clamp(0, 255)).to(torch.uint8))
        path = root / "ab"[i % 2] / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path, quality=90)
    return statistics.fmean(path.stat().st_size for path in root.rglob("*.jpg"))


def _compose_v1(crop: int, size: int) -> Any:
    from torchvision import transforms

    return transforms.Compose(
        [
            transforms.RandomCrop(size, padding=crop),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


def _compose_v2(crop: int, size: int) -> Any:
    return v2.Compose(
        [
            pil_to_tensor,
            v2.RandomCrop(size, padding=crop),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )


def _measured(title: str, pipelines: Sequence[Pipeline], batch: int, rounds: int) -> list[str]:
    """The lines of a table."""
    print(f"{title}: {rounds} rounds", file=sys.stderr, flush=True)
    rates: dict[str, list[float]] = {pipeline.title: [] for pipeline in pipelines}
    for number in range(rounds + 1):  # the first is not counted: in it caches are filled
        for pipeline in reversed(pipelines) if number % 2 else pipelines:
            rates[pipeline.title].append(_rate(pipeline, batch))
    return _table(title, {name: measured[1:] for name, measured in rates.items()})


def _rate(pipeline: Pipeline, batch: int) -> float:
    """Samples per second of a chunk, from its beginning: what is drawn for many batches counts too."""
    began = time.perf_counter()
    for _ in islice(pipeline.batches(), pipeline.samples // batch):
        pass
    return pipeline.samples / (time.perf_counter() - began)


def _table(title: str, rates: Mapping[str, Sequence[float]]) -> list[str]:
    base = next(iter(rates.values()))
    lines = [
        f"| {title} | samples/s a core | beside the first: median | quartiles | least, most |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, measured in rates.items():
        ratios = [own / theirs for own, theirs in zip(measured, base, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        spread = f"{low:.2f}, {high:.2f} | {min(ratios):.2f}, {max(ratios):.2f}"
        shown = "1 | |" if measured is base else f"**{middle:.2f}** | {spread}"
        lines.append(f"| {name} | {statistics.median(measured):,.0f} | {shown} |")
    return lines


def _note(rounds: int) -> str:
    return (
        f"Crop, flip and normalise; one process on one core, no workers, {rounds} rounds in which all take"
        " turns. ddptrain's paths were compared bit for bit."
        f" {made_with('torch', 'torchvision', 'pillow', 'ddptrain')}"
        " Made by `python benchmarks/pipelines.py`."
    )


if __name__ == "__main__":
    main()
