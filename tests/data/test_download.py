"""One download: whole and right or absent, and given up where a server does not deliver.

Many jobs, kills and bad servers at once: tests/faults/test_download.py.
"""

import hashlib
import time
from pathlib import Path

import pytest
from served import served, small_archive

from ddptrain.data.download import DownloadLimits, download
from ddptrain.data.images.cifar10 import ARCHIVE, Cifar10
from ddptrain.errors import UserError

CONTENT = b"0123456789" * 10_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
GOOD = DownloadLimits(largest=2**20)
QUICK = DownloadLimits(largest=2**20, window=0.4, least=1000)
"""A server that does not deliver is soon given up."""


def test_what_comes_is_written_once_under_its_name(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file"
    with served(CONTENT) as server:
        for _ in range(3):
            download(server.url, SHA256, target, GOOD)
    assert target.read_bytes() == CONTENT
    assert len(server.requests) == 1
    assert {path.name for path in target.parent.iterdir()} == {"file", ".file.lock"}


def test_a_part_that_a_kill_has_left_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / ".file.part").write_bytes(CONTENT[:500])
    with served(CONTENT) as server:
        download(server.url, SHA256, tmp_path / "file", GOOD)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert not (tmp_path / ".file.part").exists()


def test_a_link_in_the_place_of_the_part_or_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"precious")
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / ".file.part").symlink_to(tmp_path / "elsewhere")
    with served(CONTENT) as server:
        download(server.url, SHA256, tmp_path / "sets" / "file", GOOD)
        assert (tmp_path / "elsewhere").read_bytes() == b"precious"
        (tmp_path / "sets" / ".other.lock").symlink_to(tmp_path / "made")
        with pytest.raises(OSError, match="symbolic links"):
            download(server.url, SHA256, tmp_path / "sets" / "other", QUICK)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("way", "pause", "error", "said"),
    [
        ("cut", 0, UserError, "50,000 bytes.* is cut short or another file"),
        ("other", 0, UserError, "is cut short or another file"),
        ("endless", 0, UserError, "sends more than 1,048,576 bytes"),
        ("missing", 0, OSError, "404"),
        ("silent", 0, TimeoutError, "only 0 bytes came in 0.4 seconds|timed out"),
        ("dripping", 0.01, TimeoutError, "only [0-9]+ bytes came in 0.4 seconds"),
        ("dripping headers", 0.1, TimeoutError, "only 0 bytes came in 0.4 seconds|timed out"),
    ],
)
def test_a_server_that_does_not_deliver_is_given_up_and_nothing_is_kept(
    tmp_path: Path, way: str, pause: float, error: type[Exception], said: str
) -> None:
    began = time.monotonic()
    with served(CONTENT, way, pause) as server:
        with pytest.raises(error, match=said):
            download(server.url, SHA256, tmp_path / "file", QUICK)
    assert time.monotonic() - began < 5
    assert [path.name for path in tmp_path.iterdir()] == [".file.lock"]


def test_a_slow_server_is_waited_for(tmp_path: Path) -> None:
    with served(CONTENT, "slow", 0.05) as server:  # 80 KB/s, so it takes three windows
        download(server.url, SHA256, tmp_path / "file", QUICK)
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1/x", "/etc/hostname", "", "data:,x"])
def test_only_the_web_is_downloaded_from(tmp_path: Path, url: str) -> None:
    with pytest.raises(ValueError, match="http"):
        download(url, SHA256, tmp_path / "file", QUICK)
    assert list(tmp_path.iterdir()) == []


def test_cifar10_checks_what_another_job_has_brought(tmp_path: Path) -> None:
    with served(small_archive()) as server:
        server.source.fetch(tmp_path)
        with pytest.raises(UserError, match="its SHA-256 is not"):
            Cifar10(server.url, "0" * 64).fetch(tmp_path)
    assert (tmp_path / ARCHIVE).exists()
    assert len(server.requests) == 1
