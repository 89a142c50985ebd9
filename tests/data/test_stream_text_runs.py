"""Trainings on streamed text, as a user starts them: from a bucket, on several ranks, killed and resumed."""

import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import pytest
from bucket import Door, bucket, upload
from running import Job, assert_same_outcome, kill_at_random
from shell import ddptrain
from streamed_texts import folder_of_texts, read_epoch, small_tokenizer, written

from ddptrain.data.text.corpus import TextFiles
from ddptrain.data.text.data import TextData

TEXT_BYTES, CACHE_GB = 200_000_000, 0.02
TINY = "model.width=16 model.ngram_rows=64 model.ngram_width=8 precision=fp32 device=cpu log.every=1"
RANKS = (1, 2, 3)


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    with bucket() as opened:
        yield opened


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines]


@pytest.mark.long
def test_a_text_is_written_streamed_and_remembered(door: Door, tmp_path: Path) -> None:
    """By a tokenizer of its own; on two ranks the same bits; and it predicts when the set is gone."""
    texts = folder_of_texts(tmp_path / "texts")
    small_tokenizer(texts, tmp_path / "tokenizer.json")
    words = "write recipe=transformer_text data=text data.source.path=texts out=set block_mb=0.002"
    done = ddptrain(tmp_path, f"{words} tokenizer=tokenizer.json")
    assert done.code == 0, done.err
    assert "tokens of 38 documents" in done.out
    url = upload(door, tmp_path / "set", "small")
    for ranks in (1, 2):
        job = Job(
            f"recipe=transformer_text data=stream_text data.source.url={url} data.source.cache_gb=0.0001"
            f" data.source.shuffle_blocks=3 data.window=16 {TINY} train.batch_size=8 train.steps=30"
            " train.eval_every=15 data.valid_piece=64 data.valid_context=16 observers=[console,jsonl]"
            f" strategy=strict run.dir=run{ranks}".split(),
            tmp_path, ranks, variables=door.variables,
        )  # fmt: skip
        assert job.wait() == 0, job.text[-3000:]
        assert "blocks fetched" in job.text
    assert losses(tmp_path / "run1") == losses(tmp_path / "run2")
    shutil.rmtree(tmp_path / "data")
    asked = ["predict", "run=run2", "prompt=the cat", "tokens=20", "device=cpu"]
    told = ddptrain(tmp_path, asked, AWS_ENDPOINT_URL="http://127.0.0.1:9")
    assert told.code == 0, told.err
    assert told.out.startswith("the cat")


# -- at its real size -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(door: Door, tmp_path_factory: pytest.TempPathFactory) -> str:
    """200 MB of text in a bucket, in blocks of 1 MB."""
    root = tmp_path_factory.mktemp("text")
    (root / "text").mkdir()
    draw = random.Random(1)
    known = [draw.randbytes(draw.randint(1, 8)).hex() for _ in range(5000)]
    for i in range(400):
        text = " ".join(draw.choices(known, k=60_000))[: TEXT_BYTES // 400 - 1] + "\n"
        (root / "text" / f"{i:03}.txt").write_text(text)
    assert sum(file.stat().st_size for file in (root / "text").iterdir()) == TEXT_BYTES
    for line in TextData(TextFiles(str(root / "text"))).write(root / "set", "stream", 1.0):
        print(line)
    return upload(door, root / "set", "large")


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("order", ["shuffled", "streams"])
def test_an_epoch_of_a_large_text_through_a_small_cache(
    door: Door, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """The same global batches on 1, 2 and 3 ranks; memory does not grow with the text. Ranks are forked from
    a process that has not used obstore, whose threads don't outlive a fork."""
    for name, value in door.variables.items():
        monkeypatch.setenv(name, value)

    with ProcessPoolExecutor(1, get_context("spawn")) as clean:
        reads = {
            size: clean.submit(read_epoch, url, tmp_path / f"cache{size}", CACHE_GB, order, size)
            for size in RANKS
        }
        results = {size: read.result() for size, read in reads.items()}
    expected, _ = results[1][0]
    assert sum(map(len, expected)) > 180_000
    for size, ranks in results.items():
        steps = zip(*(found for found, _ in ranks), strict=True)
        assert [list(chain(*parts)) for parts in steps] == expected
        print(f"{order}, {size} ranks: memory grew by {[grown // 10**6 for _, grown in ranks]} MB")
        assert all(grown < 60e6 for _, grown in ranks)
        blocks = (tmp_path / f"cache{size}" / "blocks").glob("*.block")
        assert sum(file.stat().st_size for file in blocks) <= CACHE_GB * 1e9


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("recipe", "order", "batch", "window", "cache_gb"),
    [("transformer_text", "shuffled", 48, 512, 0.006), ("lstm_text", "streams", 12, 1024, CACHE_GB)],
)
def test_a_large_text_is_trained_on_killed_and_resumed_to_the_bit(
    door: Door, url: str, tmp_path: Path, recipe: str, order: str, batch: int, window: int, cache_gb: float
) -> None:
    written(folder_of_texts(tmp_path / "texts"), tmp_path / "small")  # to evaluate by, sooner

    def job(run: str, ranks: int, restarts: int = 0) -> Job:
        return Job(
            f"recipe={recipe} data=stream_text data.source.url={url} data.source.valid_url=small"
            f" data.source.cache_gb={cache_gb} data.source.cache=cache-{run} data.source.shuffle_blocks=4"
            f" data.window={window} data.order={order} train.batch_size={batch} train.steps=200 {TINY}"
            " model.layers=1 model.ngrams=[2] train.eval_every=100 checkpoint.every=10 strategy=strict"
            f" observers=[console,jsonl] run.dir={run}".split(),
            tmp_path, ranks, restarts, variables=door.variables,
        )  # fmt: skip

    for ranks in RANKS:
        calm = job(f"calm{ranks}", ranks)
        assert calm.wait(600) == 0, calm.text[-3000:]
        killed = job(f"killed{ranks}", ranks, 3)
        met = kill_at_random(killed, random.Random(ranks), range(150), 3)
        assert killed.wait(900) == 0, killed.text[-3000:]
        assert met == 3
        assert_same_outcome(tmp_path / f"calm{ranks}", tmp_path / f"killed{ranks}")
        assert losses(tmp_path / f"calm{ranks}") == losses(tmp_path / "calm1")
        fetched = calm.text.partition("stream  ")[2].partition("\n")[0]
        print(f"{recipe}, {ranks} ranks: {met} kills met somebody;{fetched}")
