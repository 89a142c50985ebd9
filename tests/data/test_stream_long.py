"""Streamed sets at their real size: killed and resumed, how much memory an index takes, and what shuffling
within blocks costs. Minutes each."""

import json
import multiprocessing
import random
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bucket import Door, bucket, upload
from running import Job, assert_same_outcome, kill_at_random
from shell import ddptrain

from ddptrain.api.blocks import Blocks
from ddptrain.data.images.augment import Augment
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.shapes import Shapes
from ddptrain.data.stream.block_table import Block, BlockTable
from ddptrain.data.stream.cache import BlockCache
from ddptrain.data.stream.samples import StreamSamples
from ddptrain.data.stream.store import Store

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]

SAMPLES, STEPS = 20_000, 160


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    with bucket() as opened:
        yield opened


@pytest.fixture(scope="module")
def url(door: Door, tmp_path_factory: pytest.TempPathFactory) -> str:
    """20,000 pictures in a bucket, in blocks of some 50 kB."""
    folder = tmp_path_factory.mktemp("set") / "set"
    data = ImageData(Shapes(SAMPLES, 400), Augment())
    for line in data.write(folder, "stream", 0.05):
        print(line)
    return upload(door, folder, "shapes")


def words(url: str, run: str, cache: Path, workers: int, cache_gb: float) -> list[str]:
    return [
        "recipe=cnn_cifar10", "data=stream", f"data.source.url={url}", "data.source.size=32", "model.width=4",
        "data.augment.crop=2", f"data.source.cache={cache}", f"data.source.cache_gb={cache_gb}",
        f"data.workers={workers}", "device=cpu", "train.batch_size=256", f"train.steps={STEPS}",
        "log.every=1", "train.eval_every=80", "checkpoint.every=10", "observers=[console,jsonl]",
        f"run.dir={run}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "workers", "kills"), [(1, 0, 4), (1, 2, 4), (2, 0, 4), (2, 2, 4), (3, 2, 4)]
)
def test_killed_and_resumed_from_a_bucket_with_a_small_cache_to_the_bit(
    door: Door, url: str, tmp_path: Path, ranks: int, workers: int, kills: int
) -> None:
    dice = random.Random(10 * ranks + workers)
    cache_gb = 0.0025
    calm = Job(
        words(url, "calm", tmp_path / "calm-cache", workers, cache_gb),
        tmp_path,
        ranks,
        variables=door.variables,
    )
    assert calm.wait(900) == 0, calm.text[-3000:]
    killed = Job(
        words(url, "killed", tmp_path / "cache", workers, cache_gb), tmp_path, ranks, restarts=kills,
        variables=door.variables,
    )  # fmt: skip
    met = kill_at_random(killed, dice, range(STEPS * 3 // 4), kills)
    assert killed.wait(1500) == 0, killed.text[-3000:]
    assert met == kills
    assert_same_outcome(tmp_path / "calm", tmp_path / "killed")
    used = sum(file.stat().st_size for file in (tmp_path / "cache" / "blocks").iterdir())
    assert used <= cache_gb * 1e9


def _hold(samples: StreamSamples, order: list[int], ready: object, go: object) -> None:
    samples.read(order, ["image"])
    ready.release()  # type: ignore[attr-defined]
    go.acquire()  # type: ignore[attr-defined]


def _pss(pid: int) -> int:
    """Bytes: a process's own pages, and its share of those that several have."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def _held_by_eight(samples: StreamSamples, order: list[int]) -> int:
    """PSS of eight processes that read from a set, together."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ddptrain.data.stream.samples"])
    ready, go = context.Semaphore(0), context.Semaphore(0)
    workers = [context.Process(target=_hold, args=(samples, order, ready, go)) for _ in range(8)]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.acquire()
    total = sum(_pss(worker.pid or 0) for worker in workers)
    for _ in workers:
        go.release()
    for worker in workers:
        worker.join()
    return total


def test_what_eight_workers_hold_of_ten_million_samples(tmp_path: Path) -> None:
    """Beside what they hold of a small set, which is Python and torch: some 280 MB, shared by all."""
    from ddptrain.data.stream.shards import packed

    content = packed([[b"x"] for _ in range(640)])
    (tmp_path / "0").write_bytes(content)

    def samples(count: int) -> StreamSamples:
        blocks = BlockTable([Block("0", 640, len(content), "ab" * 32) for _ in range(count)])
        cache = BlockCache(Store(str(tmp_path), 5), blocks, None, 10**9)
        return StreamSamples(cache, ["image"], Blocks(blocks.samples, 16))

    little, much = samples(1), samples(15_625)
    assert len(much) == 10_000_000
    few = _held_by_eight(little, list(range(10)))
    many = _held_by_eight(much, [i * 99_991 % 10_000_000 for i in range(1000)])
    print(f"eight workers: {few / 1e6:.0f} MB with 640 samples, {many / 1e6:.0f} MB with 10,000,000")
    assert many - few < 20e6


def test_shuffling_within_blocks_costs_no_accuracy(tmp_path: Path) -> None:
    """Against shuffling the whole set, on five seeds each: the means differ by less than the seeds do."""
    folder = tmp_path / "set"
    list(ImageData(Shapes(4000, 1000), Augment()).write(folder, "stream", 0.05))
    found: dict[int, list[float]] = {2: [], 100_000: []}
    for window, accuracies in found.items():
        for seed in range(5):
            run = tmp_path / f"run-{window}-{seed}"
            more = [
                "recipe=cnn_cifar10", "data=stream", f"data.source.url={folder}", "data.source.size=32",
                "data.source.cache=null", f"data.source.shuffle_blocks={window}", "data.resident=false",
                "data.workers=0", "data.augment.crop=2", "device=cpu", "model.width=8",
                "train.batch_size=100", "train.epochs=6", "observers=[jsonl]", f"run.dir={run}",
                f"seed={seed}",
            ]  # fmt: skip
            done = ddptrain(tmp_path, more, OMP_NUM_THREADS="1")
            assert done.code == 0, done.err[-2000:]
            accuracies.append(json.loads((run / "summary.json").read_text())["metrics"]["accuracy"])
    means = {window: statistics.mean(values) for window, values in found.items()}
    spread = max(max(values) - min(values) for values in found.values())
    print(f"accuracy: {found}, means {means}, spread of the seeds {spread}")
    assert abs(means[2] - means[100_000]) <= spread
    assert torch.tensor(found[2]).min() > 0.3
