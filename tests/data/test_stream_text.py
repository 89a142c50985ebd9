"""Streamed text: documents packed into blocks of tokens, and the windows that a training takes of them."""

import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from bucket import Door, bucket, upload
from hypothesis import given, settings
from hypothesis import strategies as st
from streamed_texts import folder_of_texts, small_tokenizer, streamed, tokens_of, trained, written

from ddptrain.api.sampler import Sampler
from ddptrain.data.stream.block_table import Block, BlockTable
from ddptrain.data.stream.cache import BlockCache
from ddptrain.data.stream.images import StreamImages
from ddptrain.data.stream.store import Store
from ddptrain.data.stream.tokens import TokenBlocks
from ddptrain.data.stream.write_text import cut
from ddptrain.data.text.corpus import Document, TextFiles
from ddptrain.data.text.data import TextData
from ddptrain.data.text.tokenizer import Tokenizer, read_tokenizer
from ddptrain.errors import UserError

SIZES = st.lists(st.integers(5, 60), min_size=1, max_size=9)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of_texts(tmp_path_factory.mktemp("texts") / "texts")


@pytest.fixture(scope="module")
def blocks(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its bytes, in some twenty blocks."""
    return written(texts, tmp_path_factory.mktemp("blocks") / "set")


@pytest.fixture(scope="module")
def tokenizer(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokenizer(texts, tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    with bucket() as opened:
        yield opened


def numbered(folder: str, sizes: list[int]) -> TokenBlocks:
    """Tokens 0, 1, ... in blocks of these sizes."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    found = []
    for i, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        content = torch.arange(end - size, end, dtype=torch.int32).numpy().tobytes()
        (Path(folder) / str(i)).write_bytes(content)
        found.append(Block(str(i), size, len(content), ""))
    return TokenBlocks(BlockCache(Store(folder, 1), BlockTable(found), None, 1), torch.int32, 2)


# -- windows ----------------------------------------------------------------------------------------


@given(SIZES, st.integers(1, 5), st.integers(0, 9))
@settings(deadline=None, max_examples=40)
def test_an_epoch_has_each_token_once_but_blocks_ends(sizes: list[int], window: int, seed: int) -> None:
    with TemporaryDirectory() as folder:
        tokens = numbered(folder, sizes)
        order = tokens.windows(window)
        assert order.sizes.tolist() == [size // window for size in sizes]
        ids = order.indices(int(order.sizes.sum()), seed, 0)
        found = tokens.read_windows(ids, torch.zeros_like(ids), window, seed)
        inputs = found[:, :-1].flatten().tolist()
        assert len(set(inputs)) == len(inputs) == sum(size - size % window for size in sizes)
        ends = torch.tensor(sizes).cumsum(0)
        for row in found:
            (block,) = set(torch.searchsorted(ends, row, right=True).tolist())
            begin = int(ends[block]) - sizes[block]
            assert torch.equal(row[1:] - begin, (row[:-1] - begin + 1) % sizes[block])


def test_an_epoch_cuts_a_block_at_other_places(tmp_path: Path) -> None:
    tokens = numbered(str(tmp_path), [64] * 4)
    ids = torch.arange(16)
    firsts = [tokens.read_windows(ids, torch.full((16,), epoch), 16, 1)[:, 0] % 16 for epoch in range(4)]
    assert len({tuple(first.tolist()) for first in firsts}) == 4
    assert len(set(firsts[0].tolist())) > 1, "each block's own"


@given(SIZES, st.integers(1, 70), st.lists(st.integers(0, 10**6), min_size=1, max_size=5), st.integers(1, 20))
@settings(deadline=None, max_examples=40)
def test_a_ring_is_read_across_blocks(sizes: list[int], length: int, starts: list[int], window: int) -> None:
    with TemporaryDirectory() as folder:
        tokens, total = numbered(folder, sizes), sum(sizes)
        places = torch.tensor(starts)
        expected = (places[:, None] + torch.arange(length)) % total
        assert torch.equal(tokens.read(places, length).long(), expected)
        ends = torch.tensor(sizes).cumsum(0)

        def used(first: torch.Tensor, count: int) -> set[int]:
            run = (first[:, None] + torch.arange(count)) % total
            return set(torch.searchsorted(ends, run, right=True).flatten().tolist())

        short = min(length, total)
        assert set(tokens.needs_of(0, places, short).blocks) == used(places, short)
        window = min(window, total - 1)
        needs = {
            need.position: set(need.blocks) for need in tokens.needs_of_streams(places, window, range(3, 40))
        }
        current: set[int] = set()
        for step in range(3, 40):
            current = needs.get(step, current)
            assert current >= used(places + step * window, window + 1)


@pytest.mark.parametrize("order", ["shuffled", "streams"])
def test_it_is_the_same_from_everywhere_and_on_any_ranks(
    blocks: Path, tmp_path: Path, door: Door, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """In place, from a bucket and a web server, with a cache of 60 %; resumed."""
    expected = tokens_of(trained(streamed(blocks, None, order=order), range(60)))
    url = upload(door, blocks, "same")
    for name, value in door.variables.items():
        monkeypatch.setenv(name, value)
    size = sum(file.stat().st_size for file in (blocks / "train").iterdir())
    small = 0.6 * size / 1e9
    for address in (url, f"http://127.0.0.1:{door.port}/sets/same"):
        data = streamed(address, tmp_path / address[:4], cache_gb=small, order=order)
        assert torch.equal(tokens_of(trained(data, range(60))), expected)
        assert torch.equal(tokens_of(trained(data, range(37, 60))), expected[37 * 6 :])
        assert sum(f.stat().st_size for f in (tmp_path / address[:4] / "blocks").iterdir()) < 0.6 * size
    for ranks in (2, 3):
        parts = [
            trained(streamed(url, tmp_path / "s3", order=order), range(9), ranks, r) for r in range(ranks)
        ]
        joined = [torch.cat([batch.tokens for batch in step]) for step in zip(*parts, strict=True)]
        assert torch.equal(torch.cat(joined), expected[: 9 * 6])


@pytest.mark.parametrize(("piece", "context"), [(50, 20), (7, 0), (100_000, 10)])
def test_each_held_out_token_is_scored_once_in_order(
    texts: Path, blocks: Path, tmp_path: Path, piece: int, context: int
) -> None:
    data = streamed(blocks, tmp_path, valid_piece=piece, valid_context=context)
    expected = b"".join((texts / f"{name}.txt").read_bytes() + b"\0" for name in ("00", "20"))
    chunks = [range(i, min(i + 2, data.valid_size)) for i in range(0, data.valid_size, 2)]
    found: list[int] = []
    for batch in data.valid_batches(chunks):
        assert batch.scored is not None
        found += batch.tokens[:, 1:][batch.scored].tolist()
    assert bytes(token % 256 for token in found) == expected[1:]


def test_a_block_that_the_disk_has_spoilt_is_fetched_again(blocks: Path, tmp_path: Path) -> None:
    expected = tokens_of(trained(streamed(blocks, tmp_path), range(60)))
    for file in (tmp_path / "blocks").glob("*.block"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    data = streamed(blocks, tmp_path)
    assert torch.equal(tokens_of(trained(data, range(60))), expected)
    assert data.loading.reading is not None
    assert "for they were damaged" in data.loading.reading().fetched


# -- writing ----------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 90), min_size=1, max_size=20), st.integers(1, 100), st.integers(1, 30))
@settings(deadline=None)
def test_blocks_hold_each_byte_once_in_order(sizes: list[int], raw: int, grain: int) -> None:
    documents = [Document(Path(str(i)), 100) for i in range(len(sizes))]
    found = cut(documents, sizes, raw, lambda document, at: -(-at // grain) * grain)
    runs = [run for block in found for run in block]
    for document, size in zip(documents, sizes, strict=True):
        own = [run for run in runs if run.of.path == document.path]
        at = 100
        for run in own:
            assert run.of.start == at
            at = run.of.stop or 0
            assert at > run.of.start
        assert at == 100 + size
        assert [run.ends for run in own] == [False] * (len(own) - 1) + [True]
    assert [run.of.path for run in runs] == sorted(
        (run.of.path for run in runs), key=lambda path: int(path.name)
    )
    if grain == 1:
        held = [sum((run.of.stop or 0) - run.of.start for run in block) for block in found]
        assert max(held) - min(held) <= 1


def read_back(data: TextData) -> list[list[int]]:
    """The documents to train on, as tokens."""
    tokens = data._tokens.train.read(torch.tensor([0]), len(data._tokens.train))[0].tolist()  # type: ignore[union-attr]
    end = data.vocabulary.start
    assert tokens.pop() == end
    found: list[list[int]] = [[]]
    for token in tokens:
        if token == end:
            found.append([])
        else:
            found[-1].append(token)
    return found


def test_documents_are_kept_apart_and_shuffled(texts: Path, blocks: Path, tmp_path: Path) -> None:
    data = streamed(blocks, tmp_path)
    documents = [bytes(document) for document in read_back(data)]
    files = [file.read_bytes() for i, file in enumerate(sorted(texts.iterdir())) if i % 20]
    assert documents != files
    assert sorted(documents) == sorted(files)
    assert len(list((blocks / "train").iterdir())) > 10
    assert "of 38 files to train" in data.describe()
    assert "257 kinds of tokens" in data.describe()


def test_any_tokenizer_will_do(texts: Path, tokenizer: Path, tmp_path: Path) -> None:
    out = written(texts, tmp_path / "set", 0.002, tokenizer)
    data = streamed(out, tmp_path / "cache")
    vocabulary = data.vocabulary
    assert isinstance(vocabulary, Tokenizer)
    assert len(vocabulary) == 301, "one for a document's end was added"
    assert len(list((out / "train").iterdir())) > 5
    counts = vocabulary.bytes_per_token()
    files = sorted(file.read_text() for i, file in enumerate(sorted(texts.iterdir())) if i % 20)
    documents = read_back(data)
    assert sorted("".join(vocabulary.decode(document)) for document in documents) == files
    assert sum(int(counts[document].sum()) for document in documents) == sum(len(t.encode()) for t in files)
    assert counts[vocabulary.end] == 0
    assert sum(map(len, documents)) < sum(len(text.encode()) for text in files) / 2
    again = Tokenizer(data.metadata()["tokenizer"], "")
    assert again.encode("däs → <|endoftext|>", "prompt") == vocabulary.encode("däs → <|endoftext|>", "prompt")
    assert vocabulary.end not in vocabulary.encode("<|endoftext|>", "prompt")


@given(st.text(max_size=30), st.lists(st.integers(0, 300), max_size=20))
@settings(deadline=None, max_examples=60)
def test_tokens_give_back_the_text_piece_by_piece(tokenizer: Path, text: str, ids: list[int]) -> None:
    for name in ("bytes", str(tokenizer)):
        vocabulary = read_tokenizer(name)
        tokens = vocabulary.encode(text, "prompt")
        assert "".join(vocabulary.decode(tokens)) == text
        assert "".join(vocabulary.decode([*tokens, vocabulary.end, *tokens])) == text, "and no further"
        list(vocabulary.decode(i for i in ids if i < len(vocabulary)))  # whatever a model draws


def test_pieces_come_as_soon_as_they_are_whole(tokenizer: Path) -> None:
    vocabulary = read_tokenizer(str(tokenizer))
    endless = (token for _ in range(10**6) for token in vocabulary.encode("ab\U0001d51a", "prompt"))
    assert "".join(islice(vocabulary.decode(endless), 6)) == "ab\U0001d51aab\U0001d51a"


@pytest.mark.parametrize("name", ["bytes", "tokenizer"])
def test_writing_goes_on_where_it_was_killed(texts: Path, tokenizer: Path, tmp_path: Path, name: str) -> None:
    by = "bytes" if name == "bytes" else tokenizer
    whole = written(texts, tmp_path / "whole", 0.004, by)
    out = tmp_path / "set"
    lines = TextData(TextFiles(str(texts))).write(out, "stream", 0.004, str(by))
    next(lines)  # the training part is there
    lines.close()
    (out / "train" / "chunk-0-1.bin").write_bytes(b"half")
    with pytest.raises(UserError, match="holds a part of another set"):
        written(texts, out, 0.005, by)
    written(texts, out, 0.004, by)
    files = sorted(file.relative_to(whole) for file in whole.rglob("*") if file.is_file())
    assert files == sorted(file.relative_to(out) for file in out.rglob("*") if file.is_file())
    assert all((out / file).read_bytes() == (whole / file).read_bytes() for file in files)


# -- what can't be ----------------------------------------------------------------------------------


def test_it_says_what_can_t_be(
    texts: Path, blocks: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: dict[str, Any]
    for words, said in (
        ({"url": tmp_path}, "holds neither"), ({"cache_gb": 1e-6}, r"data\.source\.cache_gb"),
        ({"valid_url": str(written(texts, tmp_path / "other", 0.006, tokenizer))}, "another tokenizer"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            streamed(**{"url": blocks, "cache": tmp_path / "cache", **words})
    data = streamed(blocks, tmp_path / "cache", cache_gb=3e-5, order="streams")
    with pytest.raises(UserError, match=r"data\.source\.cache_gb=3e-05: data\.order=streams .* 6 places"):
        data.train_batches(Sampler(data.train_size, 6, 5), range(3))
    small = written(texts, tmp_path / "small", 0.00003)
    with pytest.raises(UserError, match=r"data\.window=16: a block of the set has fewer tokens"):
        streamed(small, None)
    for name, said in (
        (tmp_path / "none", "can't be read"),
        (blocks / "ddptrain.json", "is no tokenizer.json"),
    ):
        with pytest.raises(UserError, match=rf"tokenizer={name}: {said}"):
            written(texts, tmp_path / "x", 1, name)
    (tmp_path / "latin").write_bytes(b"line\n" * 40 + b"\xe4\n" + b"line\n" * 40)
    with pytest.raises(UserError, match=r"latin: byte 200 is not UTF-8.*tokenizer=bytes"):
        written(tmp_path / "latin", tmp_path / "y", 1, tokenizer)
    with pytest.raises(UserError, match=r"data\.level=characters"):
        list(TextData(TextFiles(str(texts)), level="characters").write(tmp_path / "z"))
    with pytest.raises(UserError, match="in blocks already"):
        list(data.write(tmp_path / "z"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install 'ddptrain\[tokenizers\]'"):
        read_tokenizer(str(tokenizer))


def test_lines_longer_than_a_block(tmp_path: Path) -> None:
    """A cut waits for a line's end, which may lie several blocks further."""
    (tmp_path / "texts").mkdir()
    for name in "abc":
        (tmp_path / "texts" / f"{name}.txt").write_text("\n".join(["word " * 12_000] * 3))
    tokenizer = small_tokenizer(tmp_path / "texts", tmp_path / "tokenizer.json")
    out = written(tmp_path / "texts", tmp_path / "set", 0.006, tokenizer)
    assert tokens_of(trained(streamed(out, None), range(3))).numel() > 0
    with pytest.raises(UserError, match=r"holds a set of tokens, not of classes\. Use data=stream_text"):
        StreamImages(str(out)).open(tmp_path)


def test_a_cache_on_a_system_that_reserves_no_room(
    blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS."""
    monkeypatch.delattr(os, "posix_fallocate")
    with_cache, without = (trained(streamed(blocks, cache), range(3)) for cache in (tmp_path, None))
    assert torch.equal(tokens_of(with_cache), tokens_of(without))


def of_library(model: Any, decoder: Any) -> Tokenizer:
    tokenizers = pytest.importorskip("tokenizers")
    whole = tokenizers.Tokenizer(model)
    whole.decoder = decoder
    whole.add_special_tokens(["</s>"])
    return Tokenizer(whole.to_str(), "mine")


def test_a_blank_before_the_first_new_word_is_shown() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"\u2581Hello": 0, "\u2581world": 1, "s": 2, "<unk>": 3}
    for model, decoder in (
        (tokenizers.models.WordLevel(words, unk_token="<unk>"), tokenizers.decoders.Metaspace()),
        (
            tokenizers.models.WordPiece({"Hello": 0, "world": 1, "##s": 2, "[UNK]": 3}, unk_token="[UNK]"),
            tokenizers.decoders.WordPiece(),
        ),
    ):
        vocabulary = of_library(model, decoder)
        assert "".join(vocabulary.decode([1, 2], after=[0])) == " worlds"
        assert "".join(vocabulary.decode([0, 1, 2])) == "Hello worlds"


def test_a_suffix_that_ends_words_stands_for_a_blank() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.BPE({"a</w>": 0, "b": 1, "c</w>": 2}, [], end_of_word_suffix="</w>")
    vocabulary = of_library(model, tokenizers.decoders.BPEDecoder(suffix="</w>"))
    assert vocabulary.bytes_per_token().tolist() == [2, 1, 2, 0]
