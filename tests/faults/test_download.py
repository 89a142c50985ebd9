"""An empty cache, many processes and bad servers: one download, and never a half file used."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from served import LABELS, Served, served, small_archive

from ddptrain.api.world import World
from ddptrain.data.download import DownloadLimits
from ddptrain.data.images import cifar10
from ddptrain.data.images.cifar10 import ARCHIVE
from ddptrain.distributed.comm import once_a_node
from ddptrain.testing import RankFailed, run_ranks

pytestmark = pytest.mark.faults
TIMES = 20
CONTENT = small_archive(padding=200_000)
QUICK = DownloadLimits(largest=2**20, window=0.5, least=1000)


def train_labels(root: Path, server: Served, world: World) -> list[int]:
    once_a_node(world, lambda: server.source.fetch(root))
    labels: list[int] = server.source.open(root).train.labels.tolist()
    return labels


def four_ranks(root: Path, server: Served) -> list[list[int]]:
    return run_ranks(lambda world: train_labels(root, server, world), 4)


@pytest.mark.parametrize("time", range(TIMES))
@pytest.mark.parametrize(("way", "pause"), [("right", 0.0), ("slow", 0.01)])
def test_four_ranks_on_an_empty_cache_download_once(
    tmp_path: Path, way: str, pause: float, time: int
) -> None:
    with served(CONTENT, way, pause) as server:
        assert four_ranks(tmp_path, server) == [LABELS] * 4
    assert len(server.requests) == 1
    assert {path.name for path in tmp_path.iterdir()} == {ARCHIVE, f".{ARCHIVE}.lock"}


@pytest.mark.parametrize("time", range(TIMES))
def test_ranks_that_know_nothing_of_each_other_download_once(tmp_path: Path, time: int) -> None:
    """As two jobs on a node do, or two nodes on one disk: without `once_a_node`."""

    def rank(world: World) -> list[int]:
        return train_labels(tmp_path, server, World())

    with served(CONTENT, "slow", 0.005) as server:
        assert run_ranks(rank, 4) == [LABELS] * 4
    assert len(server.requests) == 1


@pytest.mark.parametrize("time", range(TIMES // 4))
@pytest.mark.parametrize(
    ("way", "pause", "said"),
    [
        ("cut", 0.0, "is cut short or another file"),
        ("other", 0.0, "is cut short or another file"),
        ("missing", 0.0, "can't be downloaded (HTTP Error 404"),
        ("endless", 0.0, "sends more than 1,048,576 bytes"),
        ("dripping", 0.01, "bytes came in 0.5 seconds"),
        ("silent", 0.0, "can't be downloaded"),
    ],
)
def test_a_bad_server_leaves_nothing_and_a_good_one_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, pause: float, said: str, time: int
) -> None:
    monkeypatch.setattr(cifar10, "LIMITS", QUICK)
    with served(CONTENT, way, pause) as server:
        with pytest.raises(RankFailed) as failed:
            four_ranks(tmp_path, server)
        assert said in str(failed.value)
        assert [path.name for path in tmp_path.iterdir()] == [f".{ARCHIVE}.lock"]
        assert len(server.requests) == 1
        server.way, server.pause = "right", 0.0
        assert four_ranks(tmp_path, server) == [LABELS] * 4


DOWNLOAD = """
import sys
from pathlib import Path
from ddptrain.data.images.cifar10 import Cifar10
source = Cifar10(sys.argv[1], sys.argv[2])
source.fetch(Path(sys.argv[3]))
print(source.open(Path(sys.argv[3])).train.labels.tolist(), flush=True)
"""


def job(root: Path, server: Served) -> subprocess.Popen[str]:
    words = [server.url, server.source.sha256, str(root)]
    return subprocess.Popen([sys.executable, "-c", DOWNLOAD, *words], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("seed", range(TIMES))
def test_a_rank_killed_while_it_downloads_leaves_a_part_that_is_never_used(tmp_path: Path, seed: int) -> None:
    """Two jobs; the one that downloads is killed at a random moment. The other one, which waited, takes over;
    then four ranks start on what is there."""
    with served(CONTENT, "slow", 0.01) as server:
        first = job(tmp_path, server)
        while not server.requests:
            time.sleep(0.01)
        second = job(tmp_path, server)
        time.sleep(random.Random(seed).uniform(0, 0.3))  # of half a second
        assert not (tmp_path / ARCHIVE).exists()
        first.kill()
        first.wait()
        assert second.communicate(timeout=60)[0].strip() == str(LABELS)
        assert first.stdout is not None
        assert first.stdout.read() == ""
        assert len(server.requests) == 2
        assert four_ranks(tmp_path, server) == [LABELS] * 4
    assert len(server.requests) == 2
    assert {path.name for path in tmp_path.iterdir()} == {ARCHIVE, f".{ARCHIVE}.lock"}


@pytest.mark.parametrize("seed", range(TIMES))
def test_a_job_killed_alone_starts_anew(tmp_path: Path, seed: int) -> None:
    with served(CONTENT, "slow", 0.01) as server:
        killed = job(tmp_path, server)
        while not server.requests:
            time.sleep(0.01)
        time.sleep(random.Random(seed).uniform(0, 0.3))
        killed.kill()
        killed.wait()
        assert not (tmp_path / ARCHIVE).exists()
        assert {path.name for path in tmp_path.iterdir()} <= {f".{ARCHIVE}.part", f".{ARCHIVE}.lock"}
        server.way, server.pause = "right", 0.0
        assert four_ranks(tmp_path, server) == [LABELS] * 4
    assert len(server.requests) == 2
    assert not (tmp_path / f".{ARCHIVE}.part").exists()
    assert torch.equal(server.source.open(tmp_path).train.labels, torch.tensor(LABELS))
