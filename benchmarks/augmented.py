"""Samples per second that two loader processes bring, of JPEGs cut by RandomResizedCrop and mirrored:
ddptrain, torchvision's reference pipeline, and timm's loader.

    python benchmarks/augmented.py                      # a Markdown table on stdout, in some 4 minutes
    python benchmarks/augmented.py --write docs/performance.md    # and into that file
    python benchmarks/augmented.py --rounds 3

All have two workers on two cores and give float32 batches of 64, normalised; nothing is trained. Chunks of
all take turns, in both directions, and a ratio is taken within one round. Before a chunk the workers of all
others have filled their queues and wait; what its own had ready is taken out untimed. The CPU time of all
processes, for a sample, tells more where other work shares the cores.
"""

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import compute_alone_on, made_with, publish, rounds_parser
from pipelines import ENDLESS, write_jpegs
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder as TorchvisionFolder
from torchvision.transforms import v2

from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.folder import ImageFolder
from ddptrain.data.images.transforms import RandomResizedCrop, Transforms

NAME = "augmented"
"""Of the markers."""
BATCH, WORKERS, SIZE = 64, 2, 224
READY, TIMED = 5, 6
"""Batches of a chunk: untimed, more than the workers of a loader keep ready; timed."""
REPEATS = 100
"""Names of each file, so that no loader comes to an epoch's end."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Chunk(NamedTuple):
    """rate: samples per second. cpu: milliseconds of all processes for a sample."""

    rate: float
    cpu: float


def main() -> None:
    arguments = rounds_parser(__doc__, NAME, 15).parse_args()
    compute_alone_on(WORKERS)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "pictures"
        size = write_jpegs(root)
        for file in list(root.rglob("*.jpg")):
            for i in range(1, REPEATS):
                os.link(file, file.with_name(f"{file.stem}-{i}.jpg"))
        loaders = {"torchvision's reference pipeline (PIL), DataLoader": torchvisions(root)}
        if find_spec("timm"):
            loaders["timm's `create_loader`"] = timms(root, prefetcher=False)
            loaders["timm's `create_loader`, with its prefetcher"] = timms(root, prefetcher=True)
        loaders["**ddptrain**"] = ours(root)
        chunks: dict[str, list[Chunk]] = {title: [] for title in loaders}
        for number in range(arguments.rounds + 1):  # the first is not counted: in it caches are filled
            print(f"round {number} of {arguments.rounds}", file=sys.stderr, flush=True)
            for title in reversed(loaders) if number % 2 else loaders:
                chunks[title].append(_chunk(loaders[title]))
    lines = _table(size, {title: measured[1:] for title, measured in chunks.items()})
    publish("\n".join([*lines, "", _note(arguments.rounds)]), NAME, arguments.write)


def ours(root: Path) -> Iterator[Any]:
    """As a run with ``data.augment`` of RandomResizedCrop and mirror images."""
    augment = Transforms({"flip": v2.RandomHorizontalFlip()}, RandomResizedCrop())
    data = ImageData(ImageFolder(SIZE), augment, str(root), workers=WORKERS, resident=False)
    data.prepare(World(), seed=0)
    return data.train_batches(Sampler(data.train_size, BATCH, seed=0), ENDLESS)


def torchvisions(root: Path) -> Iterator[Any]:
    """ClassificationPresetTrain of torchvision's references/classification/presets.py, at its defaults."""
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE, antialias=True),
            transforms.RandomHorizontalFlip(0.5),
            transforms.PILToTensor(),
            transforms.ConvertImageDtype(torch.float),
            transforms.Normalize(MEAN, STD),
        ]
    )
    pictures = TorchvisionFolder(str(root), transform)
    return iter(DataLoader(pictures, BATCH, shuffle=True, num_workers=WORKERS, drop_last=True))


def timms(root: Path, prefetcher: bool) -> Iterator[Any]:
    """Without ColorJitter, which timm would add. prefetcher: workers send uint8, the trainer normalises."""
    from timm.data import ImageDataset, create_loader

    return iter(
        create_loader(
            ImageDataset(str(root)),
            (3, SIZE, SIZE),
            BATCH,
            is_training=True,
            color_jitter=0.0,
            interpolation="bilinear",
            num_workers=WORKERS,
            device=torch.device("cpu"),
            use_prefetcher=prefetcher,
        )
    )


def _chunk(batches: Iterator[Any]) -> Chunk:
    time.sleep(1)  # the last chunk's workers fill their queue
    for images, _ in islice(batches, READY):
        assert images.shape == (BATCH, 3, SIZE, SIZE)
        assert images.dtype == torch.float32
    count, worked, began = BATCH * TIMED, _cpu_seconds(), time.perf_counter()
    for _ in islice(batches, TIMED):
        pass
    return Chunk(count / (time.perf_counter() - began), 1000 * (_cpu_seconds() - worked) / count)


def _cpu_seconds() -> float:
    """Of this process and all workers; those of other loaders wait."""
    seconds = time.process_time()
    for worker in multiprocessing.active_children():
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def _table(size: float, chunks: Mapping[str, Sequence[Chunk]]) -> list[str]:
    base = next(iter(chunks.values()))
    lines = [
        f"| JPEGs of 500 x 375 ({size / 1000:.0f} kB) to {SIZE} x {SIZE}, 2 workers on 2 cores | samples/s"
        " | beside the first: median | least, most | CPU ms a sample | beside the first |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for title, measured in chunks.items():
        faster = [own.rate / theirs.rate for own, theirs in zip(measured, base, strict=True)]
        leaner = statistics.median(own.cpu / theirs.cpu for own, theirs in zip(measured, base, strict=True))
        rate, cpu = (statistics.median(of) for of in zip(*measured, strict=True))
        spread = f"**{statistics.median(faster):.2f}** | {min(faster):.2f}, {max(faster):.2f}"
        beside = ("1 |", "1") if measured is base else (spread, f"{leaner:.2f}")
        lines.append(f"| {title} | {rate:,.0f} | {beside[0]} | {cpu:.2f} | {beside[1]} |")
    return lines


def _note(rounds: int) -> str:
    packages = ["torch", "torchvision", *(["timm"] if find_spec("timm") else []), "pillow", "ddptrain"]
    return (
        f"RandomResizedCrop of 8 to 100 % of the area, mirror images and normalising, batches of {BATCH};"
        f" {rounds} rounds in which all take turns. The pictures are smooth shapes with noise on them."
        f" {made_with(*packages)}"
        " Made by `python benchmarks/augmented.py`."
    )


if __name__ == "__main__":
    main()
