"""What can go wrong between a bucket and a training, and a cache that several processes share."""

import logging
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import socketserver
import threading
import time
from pathlib import Path

import pytest
import torch
from bucket import BUCKET, Answer, Door, Fault, door, upload
from masked import mask_set
from streamed_sets import assert_same, blocks, pictures, streamed, trained, written

from ddptrain.api.world import World
from ddptrain.data.masks.data import MaskData
from ddptrain.data.stream.block_prefetch import BlockPrefetch, Need
from ddptrain.data.stream.block_table import Block, BlockTable
from ddptrain.data.stream.cache import BlockCache
from ddptrain.data.stream.masks import StreamMasks
from ddptrain.data.stream.store import Store
from ddptrain.errors import UserError

__all__ = ["blocks", "door", "pictures"]  # fixtures

STEPS = range(15)
EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"


def once_for_each_block(answer: Answer) -> Fault:
    return lambda path, number: answer if path.endswith(".bin") and number == 0 else None


@pytest.mark.parametrize(
    "fault",
    [
        once_for_each_block(Answer(500)),
        once_for_each_block(Answer(503)),
        once_for_each_block(Answer(0)),
        once_for_each_block(Answer(cut=100)),
        once_for_each_block(Answer(body=b"not what was asked for")),
        lambda path, number: Answer(500) if number < 3 and not path.endswith(".bin") else None,
    ],
    ids=["500", "503", "dead line", "cut", "other bytes", "500 for the index"],
)
def test_what_passes_is_waited_for(blocks: Path, tmp_path: Path, door: Door, fault: Fault) -> None:
    expected = trained(streamed(blocks, None), STEPS)
    url = upload(door, blocks, "set")
    door.fault = fault
    assert_same(trained(streamed(url, tmp_path), STEPS), expected)


def last_block(answer: Answer) -> Fault:
    return lambda path, number: answer if path.endswith("train/chunk-0-5.bin") else None


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (last_block(Answer(403)), r"chunk-0-5\.bin: the store refuses it \(403\).*AWS_ACCESS_KEY_ID"),
        (last_block(Answer(404)), r"chunk-0-5\.bin: is not there \(404\)"),
        pytest.param(
            last_block(Answer(500)),
            r"chunk-0-5\.bin: was not available for 2 seconds \(500 Internal Server Error",
            marks=pytest.mark.faults,
        ),
        (last_block(Answer(400, EXPIRED)), r"chunk-0-5\.bin: the store refuses it \(ExpiredToken\).*expired"),
        (last_block(Answer(body=b"changed")), r"chunk-0-5\.bin: it has 7 bytes.*Write the set anew"),
        pytest.param(
            last_block(Answer(cut=100)),
            r"chunk-0-5\.bin: was not available for 2 seconds",
            marks=pytest.mark.faults,
        ),
        (lambda path, number: Answer(403), r"ddptrain\.json: the store refuses it"),
    ],
    ids=["403", "404", "500", "expired", "changed", "cut", "403 for the index"],
)
def test_what_does_not_pass_is_named(
    blocks: Path, tmp_path: Path, door: Door, fault: Fault, said: str
) -> None:
    url = upload(door, blocks, "set")
    door.fault = fault
    with pytest.raises(UserError, match=said) as found:
        trained(streamed(url, tmp_path, retry_s=2), STEPS)
    assert "never-in-a-log" not in str(found.value)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://{port}", "Connection refused, at {port}"),
        ("http://no.such.host.invalid", ", at no.such.host.invalid"),
        ("http://{rude}", "it has closed the connection, at {rude}"),
    ],
)
@pytest.mark.parametrize("url", ["s3://bucket/set", "{address}/set"])
def test_a_store_that_is_not_there_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, address: str, said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = f"127.0.0.1:{free.getsockname()[1]}"
    with socketserver.TCPServer(("127.0.0.1", 0), Rude) as rude:
        threading.Thread(target=rude.serve_forever, args=(0.05,), daemon=True).start()
        named = {"port": port, "rude": f"127.0.0.1:{rude.server_address[1]}"}
        address, said = address.format(**named), said.format(**named)
        url = url.format(address=address)
        monkeypatch.setenv("AWS_ENDPOINT", address)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "never-in-a-log")
        store = Store(url, retry_s=0.1)
        with pytest.raises(UserError) as found:
            store.read("ddptrain.json")
        rude.shutdown()
    message = str(found.value)
    assert message.startswith(f"{url}/ddptrain.json: was not available for 0 seconds (")
    assert f"{said})" in message
    assert len(message) < 250


class Rude(socketserver.BaseRequestHandler):
    """Hears a request and hangs up."""

    def handle(self) -> None:
        self.request.recv(1000)


def test_a_store_that_hangs_is_asked_again(
    blocks: Path, tmp_path: Path, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddptrain.data.stream.store._STALLED_S", 1)
    url = upload(door, blocks, "set")

    def fault(path: str, number: int) -> Answer | None:
        if path.endswith("chunk-0-3.bin") and number == 0:
            time.sleep(5)
        return None

    door.fault = fault
    assert_same(trained(streamed(url, tmp_path), STEPS), trained(streamed(blocks, None), STEPS))


def cached(cache: Path) -> list[Path]:
    return sorted((cache / "blocks").glob("*.block"))


def test_a_damaged_block_is_fetched_again_and_counted(
    blocks: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = trained(streamed(blocks, None), STEPS)
    assert_same(trained(streamed(blocks, tmp_path), STEPS), expected)
    files = cached(tmp_path)
    for file, damage in zip(files[:3], (b"", b"half", None), strict=True):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 255
        file.write_bytes(content if damage is None else damage)
    caplog.set_level(logging.WARNING, "ddptrain")
    data = streamed(blocks, tmp_path)
    assert_same(trained(data, STEPS), expected)
    again = len(re.findall("is damaged; it is fetched again", caplog.text))
    assert 1 <= again <= 3
    assert data.loading.reading is not None
    assert f", {again} of them again, for they were damaged" in data.loading.reading().fetched


def test_what_a_disk_has_spoilt_is_seen_before_its_first_use(
    pictures: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every picture of every block is another one, though most can still be decoded."""
    blocks = written(pictures, tmp_path / "set", block_mb=0.03)
    expected = trained(streamed(blocks, None), STEPS)
    trained(streamed(blocks, tmp_path / "cache"), STEPS)
    for file in cached(tmp_path / "cache"):
        content = bytearray(file.read_bytes())
        for i in range(700, len(content), 400):
            content[i] ^= 4
        file.write_bytes(content)
    caplog.set_level(logging.ERROR, "ddptrain")
    assert_same(trained(streamed(blocks, tmp_path / "cache"), STEPS), expected)


def test_masks_of_a_spoilt_block_are_read_again(tmp_path: Path) -> None:
    files = MaskData(str(mask_set(tmp_path / "files")), size=64)
    list(files.write(tmp_path / "set", "stream", 0.002))
    source = StreamMasks(str(tmp_path / "set"), cache=str(tmp_path / "cache"), shuffle_blocks=2)
    data = MaskData(size=64, source=source)
    data.prepare(World(), seed=5)
    expected = data.valid_samples(4)
    for file in cached(tmp_path / "cache"):
        content = bytearray(file.read_bytes())
        content[100:-100:7] = b"x" * len(content[100:-100:7])
        file.write_bytes(content)
    for found, before in zip(data.valid_samples(4), expected, strict=True):
        assert torch.equal(found, before)


def test_a_set_of_another_program_that_changes_is_refused(blocks: Path, tmp_path: Path) -> None:
    """Its index holds no digests; ours of the first reading does."""
    folder = tmp_path / "set"
    shutil.copytree(blocks / "train", folder)
    more = {"valid_url": str(blocks / "valid"), "classes": 3}
    running = streamed(folder, tmp_path / "cache", **more)
    shutil.rmtree(tmp_path / "cache" / "blocks")
    first = folder / "chunk-0-0.bin"
    content = bytearray(first.read_bytes())
    content[100] ^= 1  # in a picture
    first.write_bytes(content)
    with pytest.raises(UserError, match=r"chunk-0-0\.bin: its SHA-256 is another one"):
        trained(running, STEPS)
    # what begins now reads the set as it is, and is no resume of that
    assert streamed(folder, tmp_path / "cache", **more).identity != running.identity


def test_a_refused_manifest_hides_no_other_index(blocks: Path, tmp_path: Path, door: Door) -> None:
    """S3 answers 403 for what is missing to those who may not list a bucket."""
    url = upload(door, blocks, "set")
    door.fault = lambda path, number: Answer(403) if path.endswith("ddptrain.json") else None
    data = streamed(f"{url}/train", tmp_path, valid_url=f"{url}/valid", classes=3)
    assert data.train_size == 60


def test_an_address_with_a_key_in_it_is_refused() -> None:
    for url in ("https://user:pass@word@host/x", "https://host/x?sig=secret"):
        with pytest.raises(UserError, match="holds a password or a query") as found:
            streamed(url, Path("cache"))
        assert not re.search("pass|word@|secret", str(found.value).replace("holds a password", ""))


def make_cache(folder: Path, store: Path, limit: int, count: int = 12, size: int = 1000) -> BlockCache:
    store.mkdir(exist_ok=True)
    for i in range(count if not any(store.iterdir()) else 0):
        (store / f"{i}").write_bytes(random.Random(i).randbytes(size))
    table = BlockTable([Block(f"{i}", 1, size, "") for i in range(count)])
    return BlockCache(Store(str(store), 5), table, folder, limit)


def used(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_the_folder_stays_within_its_bounds_and_what_was_needed_last_stays(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache", tmp_path / "store", limit=5500)
    for i in range(12):
        cache.fetched(i)
        assert used(tmp_path / "cache") <= 5500
        cache.touch(0)
    assert cache.path(0).exists()
    assert [i for i in range(1, 12) if cache.path(i).exists()] == [8, 9, 10, 11]


def test_what_comes_next_is_fetched_even_if_one_batch_needs_more_than_the_share(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache", tmp_path / "store", limit=50_000)
    needs = [Need(i, range(4 * i, 4 * i + 4)) for i in range(3)]
    with BlockPrefetch(cache, needs, share=2500) as ahead:
        for position in range(3):
            ahead.at(position)
            until = time.monotonic() + 20
            while not cache.path(4 * position).exists():
                assert time.monotonic() < until, f"nothing for batch {position}"
                time.sleep(0.01)


def fill(folder: Path, store: Path, seed: int) -> None:
    cache = make_cache(folder, store, limit=6500)
    order = random.Random(seed)
    for _ in range(300):
        i = order.randrange(12)
        try:
            content = cache.fetched(i).read_bytes()
        except FileNotFoundError:  # removed since
            continue
        assert content[:1000] == (store / f"{i}").read_bytes()


@pytest.mark.faults
def test_jobs_share_a_cache_and_may_be_killed_while_they_fill_it(tmp_path: Path) -> None:
    make_cache(tmp_path / "cache", tmp_path / "store", limit=6500)
    context = multiprocessing.get_context("forkserver")
    dice = random.Random(3)
    for turn in range(6):
        jobs = [
            context.Process(target=fill, args=(tmp_path / "cache", tmp_path / "store", 10 * turn + i))
            for i in range(3)
        ]
        for job in jobs:
            job.start()
        time.sleep(0.2 + 0.3 * dice.random())
        victim = jobs[dice.randrange(3)]
        if victim.pid is not None and victim.is_alive():
            os.kill(victim.pid, signal.SIGKILL)
        for job in jobs:
            job.join(60)
            assert job is victim or job.exitcode == 0
        assert used(tmp_path / "cache") <= 6500


@pytest.mark.long
def test_two_jobs_train_from_one_small_cache(blocks: Path, tmp_path: Path, door: Door) -> None:
    expected = trained(streamed(blocks, None), STEPS)
    url = upload(door, blocks, "set")
    size = sum(file.stat().st_size for file in (blocks / "train").iterdir())
    found: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def job(number: int) -> None:
        found[number] = trained(streamed(url, tmp_path, cache_gb=size / 2e9), STEPS)

    threads = [threading.Thread(target=job, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same(found[0], expected)
    assert_same(found[1], expected)


def test_no_secret_lands_in_a_folder(blocks: Path, tmp_path: Path, door: Door) -> None:
    trained(streamed(upload(door, blocks, "set"), tmp_path), range(3))
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"never-in-a-log" not in file.read_bytes()
    assert BUCKET in str(door.asked)
