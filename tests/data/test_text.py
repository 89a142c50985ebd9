"""Text as data: which files, which tokens, which windows; made once, mapped, and put together again."""

import json
import os
import random
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.text.corpus import Corpus, Document, StandardLibrary, TextFiles
from ddptrain.data.text.data import TextData
from ddptrain.data.text.tokens import Vocabulary, open_tokens, tokens_folder, write_tokens
from ddptrain.errors import UserError
from ddptrain.testing import run_ranks


def read(documents: Any) -> bytes:
    return b"".join(block for document in documents for block in document.blocks())


def opened(path: Path, root: Path, **settings: Any) -> TextData:
    data = TextData(TextFiles(str(path)), root=str(root), **settings)
    data.prepare(World(), 0)
    return data


# -- which files ------------------------------------------------------------------------------------


def test_of_a_folder_every_twentieth_file_is_held_out_in_sorted_order(tmp_path: Path) -> None:
    for i in random.Random(0).sample(range(45), 45):
        folder = tmp_path / "text" / f"part{i // 10}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i:02}.txt").write_text(f"file {i}\n")
    (tmp_path / "text/.hidden").write_text("hidden\n")
    (tmp_path / "text/part0/01.log").write_text("log\n")
    corpus = TextFiles(str(tmp_path / "text"), pattern="*.txt").corpus()
    assert read(corpus.valid) == b"file 0\nfile 20\nfile 40\n"
    assert read(corpus.train) == b"".join(b"file %d\n" % i for i in range(45) if i % 20)


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (b"".join(b"line %02d\n" % i for i in range(40)), b"line 39\n"),  # the 38th line is cut after its end
        (b"x" * 100, b"x" * 5),
        (b"".join(b"word " * 20 + b"\n" for _ in range(10)) + b"\n", None),  # not a single token is left
        (b"word " * 200 + b"\n", None),
        ("ä".encode() * 50 + b"abcd", None),  # no line ends: no character is cut in two
        ("→".encode() * 50, None),
        ("\U0001d518".encode() * 33, None),
        (b"\n" * 40, b"\n"),
        (b"ten words\n" * 4, b"s\n"),
    ],
)
def test_of_a_single_file_the_last_twentieth_is_held_out(
    tmp_path: Path, text: bytes, valid: bytes | None
) -> None:
    (tmp_path / "text").write_bytes(text)
    corpus = TextFiles(str(tmp_path / "text")).corpus()
    train, held_out = read(corpus.train), read(corpus.valid)
    assert train + held_out == text
    assert len(text) / 40 - 4 < len(held_out) <= len(text) / 20 + 4
    assert valid is None or held_out == valid
    train.decode()


def test_what_ddptrain_wrote_itself_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token files, and the folders of runs, sweeps and sets, where they lie in the folder of the text."""
    monkeypatch.chdir(tmp_path)
    for i in range(3):
        Path(f"{i}.txt").write_text(f"text {i}\n" * 20)
    Path("empty.txt").touch()
    data = opened(Path(), Path("data"), window=4)
    before = data.identity
    for folder, names in {
        "runs/lstm_text/one": ("config.yaml", "command.txt", "log.txt"),
        "runs/lstm_text/begun": (".lock", "log.txt"),
        "runs/lstm_text/sweep": (".lock", "ledger.jsonl", "0/output.txt"),
        "blocks": ("ddptrain.json", "train/chunk-0-0.bin"),
        "half": ("progress.jsonl", "train/chunk-0-0.bin"),
    }.items():
        for name in names:
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, name).write_text('{"set": "not text"}')
    assert opened(Path(), Path("data"), window=4).identity == before
    assert len(list(Path("data/tokens").glob("text-*"))) == 1
    Path("3.txt").write_text("more\n" * 20)
    assert opened(Path(), Path("data"), window=4).identity != before


def test_the_folder_of_sets_and_tokens_is_left_out_unless_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO", "ddptrain")
    for folder, count in (("notes", 3), ("data/books", 2), ("data/stream/set", 4)):
        Path(folder).mkdir(parents=True)
        for i in range(count):
            Path(folder, f"{i}.txt").write_text(f"text {i}\n" * 20)
    for path, count, left_out in ((".", 3, ["data"]), ("data", 2, ["data/stream", "data/tokens"])):
        before = opened(Path(path), Path("data"), window=4)
        caplog.clear()
        again = opened(Path(path), Path("data"), window=4)
        assert f"of {count - 1:,} files to train" in again.describe()
        assert again.identity == before.identity
        told = [str(record.args[0]) for record in caplog.records if "left out" in record.msg]
        assert sorted(told) == left_out


@pytest.mark.parametrize("way", ["a link", "from elsewhere", "replaced"])
def test_another_text_of_equal_name_size_and_time_is_read_anew(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text(f"text {i}\n" * 100)
        os.utime(tmp_path / name / "text", (1, 1))
    monkeypatch.chdir(tmp_path / "one")
    if way == "a link":
        Path("linked").symlink_to("text")
    path = Path("linked" if way == "a link" else "text")
    before = opened(path, tmp_path / "data", window=4).identity
    if way == "a link":
        path.unlink()
        path.symlink_to("../two/text")
    elif way == "from elsewhere":
        monkeypatch.chdir(tmp_path / "two")
    else:
        path.write_text("text 1\n" * 100)  # as long
    assert opened(path, tmp_path / "data", window=4).identity != before


def test_a_folder_that_can_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locked").mkdir()
    scandir = os.scandir

    def refused(path: Any) -> Any:  # for root may read anything
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(UserError, match="locked can't be read"):
        TextFiles(str(tmp_path)).corpus()


def test_the_standard_library_is_all_of_it_but_tests_with_no_file_in_both_parts() -> None:
    corpus = StandardLibrary().corpus()
    train, valid = ([document.path for document in part] for part in (corpus.train, corpus.valid))
    assert not set(train) & set(valid)
    root = Path(sysconfig.get_path("stdlib"))
    names = {str(path.relative_to(root)) for path in (*train, *valid)}
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= names
    foreign = {"test", "tests", "site-packages", "dist-packages"}
    assert not [name for name in names if foreign & set(name.split("/"))]
    source = [path for path in root.rglob("*.py") if not foreign & set(path.relative_to(root).parts)]
    assert valid == sorted(source)[::20]
    assert sorted([*train, *valid]) == sorted(source)
    assert 4e6 < sum(path.stat().st_size for path in (*train, *valid)) < 4e7


# -- tokens -----------------------------------------------------------------------------------------


@given(st.text(max_size=60))
@settings(max_examples=50, deadline=None)
def test_text_survives_its_tokens(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()  # no lone surrogates: they are in no file
    for vocabulary in (Vocabulary(), Vocabulary("".join(sorted(set(text))))):
        tokens = vocabulary.encode(text, "test")
        assert "".join(vocabulary.decode(tokens)) == text
        lengths = vocabulary.bytes_per_token()
        assert int(lengths[torch.tensor(tokens, dtype=torch.int64)].sum()) == len(text.encode())


def test_bytes_that_are_no_text_are_shown_as_such_and_the_rest_goes_on() -> None:
    assert "".join(Vocabulary().decode([0x61, 0xFF, 0x62, 0xC3])) == "a\ufffdb\ufffd"
    assert list(Vocabulary().decode("ä→".encode())) == ["ä", "→"]


@pytest.mark.parametrize("level", ["bytes", "characters"])
def test_token_files_hold_the_text(tmp_path: Path, level: Any) -> None:
    text = "".join(random.Random(0).choices("abc →äß\U0001d518\n", k=70_000))
    (tmp_path / "text").write_text(text, newline="")
    corpus = TextFiles(str(tmp_path / "text")).corpus()
    folder = tokens_folder(tmp_path / "data", "text", corpus, level)
    write_tokens(folder, corpus, level)
    tokens = open_tokens(folder)
    found = "".join(tokens.vocabulary.decode([*tokens.train.tolist(), *tokens.valid.tolist()]))
    assert found == text
    assert tokens.train.dtype == torch.uint8


def test_a_large_alphabet_takes_wider_tokens(tmp_path: Path) -> None:
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 1000))) * 3
    (tmp_path / "text").write_text(text)
    data = opened(tmp_path / "text", tmp_path / "data", level="characters", window=5)
    assert len(data.vocabulary) == 1000
    [batch] = data.train_batches(Sampler(data.train_size, 4, 0), range(1))
    row = batch.tokens[0].tolist()
    assert "".join(data.vocabulary.decode(row)) == text[:6]


def test_a_character_across_two_blocks_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddptrain.data.text.corpus._BLOCK", 5)
    text = "a→\U0001d518ä" * 30
    (tmp_path / "text").write_text(text)
    corpus = Corpus([Document(tmp_path / "text")], [])
    write_tokens(tmp_path / "tokens", corpus, "characters")
    tokens = open_tokens(tmp_path / "tokens")
    assert "".join(tokens.vocabulary.decode(tokens.train.tolist())) == text


@pytest.mark.parametrize("at", [0, 3, 7])
def test_the_byte_that_is_no_utf8_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    monkeypatch.setattr("ddptrain.data.text.corpus._BLOCK", 4)
    (tmp_path / "text").write_bytes("→aäbcd→e".encode()[:at] + b"\xff" + b"rest")
    with pytest.raises(UserError, match=rf"text: byte {at} is not UTF-8"):
        write_tokens(tmp_path / "tokens", Corpus([Document(tmp_path / "text")], []), "characters")
    assert not list(tmp_path.glob("*tokens*"))


def test_tokens_are_made_once_and_anew_when_a_file_has_changed(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("one two three\n" * 20)
    opened(text, tmp_path / "data", window=4)
    [folder] = (tmp_path / "data/tokens").glob("text-*")
    before = (folder / "train").stat().st_mtime_ns
    opened(text, tmp_path / "data", window=4)
    assert (folder / "train").stat().st_mtime_ns == before
    text.write_text("one two four\n" * 20)
    assert opened(text, tmp_path / "data", window=4).train_size == 19 * len("one two four\n") // 4
    assert len(list((tmp_path / "data/tokens").glob("text-*"))) == 2


def test_another_level_or_time_makes_other_tokens(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("one two three\n" * 20)
    corpus = TextFiles(str(tmp_path / "text")).corpus()
    folders = [tokens_folder(tmp_path, "text", corpus, level) for level in ("bytes", "characters")]
    os.utime(tmp_path / "text", (1, 1))
    folders.append(tokens_folder(tmp_path, "text", corpus, "bytes"))
    assert len(set(folders)) == 3


def test_token_files_that_are_cut_short_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("one two three\n" * 20)
    opened(tmp_path / "text", tmp_path / "data", window=4)
    [folder] = (tmp_path / "data/tokens").glob("text-*")
    os.truncate(folder / "train", 5)
    with pytest.raises(UserError, match="its token files are cut short"):
        opened(tmp_path / "text", tmp_path / "data", window=4)


@pytest.mark.parametrize(
    "facts",
    [{"alphabet": [[]]}, {"alphabet": False}, {"documents": [1]}, {"documents": ["1", 1]}, {"sha256": None}],
)
def test_token_files_with_damaged_facts_are_refused(tmp_path: Path, facts: dict[str, Any]) -> None:
    (tmp_path / "text").write_text("one two three\n" * 20)
    write_tokens(tmp_path / "tokens", TextFiles(str(tmp_path / "text")).corpus(), "bytes")
    about = tmp_path / "tokens/about.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | facts))
    with pytest.raises(UserError, match=r"its about\.json is damaged"):
        open_tokens(tmp_path / "tokens")


def test_of_two_jobs_one_writes_and_what_a_killed_one_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("one two three\n" * 20)
    corpus = TextFiles(str(tmp_path / "text")).corpus()
    (tmp_path / "tokens/.another.part").mkdir(parents=True)
    (tmp_path / "tokens/.another.part/train").write_text("hal")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: write_tokens(tmp_path / "tokens/text", corpus, "bytes"), range(2)))
    assert len(open_tokens(tmp_path / "tokens/text").train) == 266
    assert sorted(os.listdir(tmp_path / "tokens")) == [".lock", "text"]


def test_ranks_of_a_node_share_what_one_of_them_makes(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("one two three\n" * 50)

    def rank(world: World) -> tuple[int, list[str]]:
        data = TextData(TextFiles(str(tmp_path / "text")), root=str(tmp_path / "data"), window=4)
        data.prepare(world, 0)
        return data.train_size, sorted(os.listdir(tmp_path / "data/tokens"))

    results = run_ranks(rank, 3)
    assert results == [results[0]] * 3
    assert [name for name in results[0][1] if "part" in name] == [], "nothing is left of writing aside"
    assert len(results[0][1]) == 2, "and the lock"


# -- windows ----------------------------------------------------------------------------------------


def ring(tmp_path: Path, size: int = 1000, **settings: Any) -> tuple[TextData, torch.Tensor]:
    """A text of random bytes; ``size`` of them to train on."""
    text = random.Random(1).randbytes(size + size // 19 + 1).replace(b"\n", b"_")
    (tmp_path / "text").write_bytes(text)
    data = opened(tmp_path / "text", tmp_path / "data", **{"window": 7, **settings})
    return data, torch.tensor(list(text))


def test_a_stream_goes_on_where_it_ended_and_all_streams_cover_the_text(tmp_path: Path) -> None:
    data, text = ring(tmp_path)
    size = int(data._tokens.train.numel())
    batches = list(data.train_batches(Sampler(data.train_size, 10, 0), range(40)))
    for before, after in pairwise(batches):
        assert torch.equal(before.tokens[:, -1], after.tokens[:, 0])
    for row in range(10):
        start = row * size // 10
        read = torch.cat([batch.tokens[row, :-1] for batch in batches])
        expected = text[(start + torch.arange(len(read))) % size]
        assert torch.equal(read, expected)


def test_a_resumed_stream_reads_on(tmp_path: Path) -> None:
    data, _ = ring(tmp_path)
    sampler = Sampler(data.train_size, 10, 0, micro_batch=4)
    whole = list(data.train_batches(sampler, range(30)))
    rest = list(data.train_batches(sampler, range(20, 30)))
    per_step = len(sampler.micro_sizes)
    for a, b in zip(whole[20 * per_step :], rest, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert a.rows == b.rows


def test_shuffled_windows_cover_an_epoch_once_from_another_place_each_time(tmp_path: Path) -> None:
    data, text = ring(tmp_path, order="shuffled")
    size = int(data._tokens.train.numel())
    windows = data.train_size
    batches = list(data.train_batches(Sampler(windows, windows, 3), range(3)))
    places = []
    for batch in batches:
        starts = sorted(
            next(at for at in range(size) if torch.equal(text[(at + torch.arange(8)) % size], row))
            for row in batch.tokens
        )
        gaps = {b - a for a, b in pairwise(starts)}
        assert gaps == {7}, "side by side, with nothing twice"
        places.append(starts[0] % 7)
    assert len(set(places)) > 1
    assert not torch.equal(batches[0].tokens, batches[0].tokens.sort(dim=0).values)


@pytest.mark.parametrize(("piece", "context"), [(16, 8), (7, 0), (5, 40), (1000, 10)])
def test_each_held_out_token_is_scored_once_after_its_context(
    tmp_path: Path, piece: int, context: int
) -> None:
    data, _ = ring(tmp_path, valid_piece=piece, valid_context=context)
    valid = data._tokens.valid.to(torch.int64)
    found = []
    for chunk in (range(i, min(i + 2, data.valid_size)) for i in range(0, data.valid_size, 2)):
        [batch] = data.valid_batches([chunk])
        assert batch.scored is not None
        for row, scored in zip(batch.tokens, batch.scored, strict=True):
            first = int(scored.nonzero()[0])
            at = len(found) + 1
            seen = min(at - 1, context)
            assert first >= seen
            assert row[first + 1 - seen - 1 : first + 1].tolist() == valid[at - seen - 1 : at].tolist()
            found += row[1:][scored].tolist()
    assert found == valid[1:].tolist()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"window": 2000}, r"data.window=2000: the text to train on has 1\d\d\d tokens"),
        ({"window": 0}, "data.window=0"),
        ({"valid_piece": 0}, "data.valid_piece=0"),
        ({"valid_context": -1}, "data.valid_context=-1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, settings: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        ring(tmp_path, **settings)


def test_more_streams_than_windows_are_refused(tmp_path: Path) -> None:
    data, _ = ring(tmp_path)
    with pytest.raises(UserError, match=r"train.batch_size=200: .* Take \d+ or fewer"):
        next(data.train_batches(Sampler(data.train_size, 200, 0), range(1)))
