"""Small streamed texts, and a tokenizer for them."""

import random
import zlib
from pathlib import Path
from typing import Any

import torch

from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.stream.text import StreamText
from ddptrain.data.text.corpus import TextFiles
from ddptrain.data.text.data import TextData, Windows
from ddptrain.testing import run_ranks

WORDS = ["the", "cat", "sat", "on", "a", "mat", "<|endoftext|>", "däs", "saß", "→", "\U0001d518"]


def folder_of_texts(root: Path, files: int = 40, lines: int = 60) -> Path:
    draw = random.Random(3)
    root.mkdir()
    for i in range(files):
        text = [" ".join(draw.choice(WORDS) for _ in range(10)) for _ in range(draw.randint(1, lines))]
        (root / f"{i:02}.txt").write_text(f"file {i}\n" + "\n".join(text), encoding="utf-8")
    return root


def small_tokenizer(text: Path, file: Path, vocabulary: int = 300) -> Path:
    """A byte-level BPE, without a token for a document's end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=letters, show_progress=False)
    made.train(list(map(str, sorted(text.iterdir()))), trainer)
    made.save(str(file))
    return file


def written(text: Path, out: Path, block_mb: float = 0.006, tokenizer: Path | str = "bytes") -> Path:
    list(TextData(TextFiles(str(text))).write(out, "stream", block_mb, str(tokenizer)))
    return out


def streamed(
    url: Path | str, cache: Path | None, cache_gb: float = 1e-3, world: World | None = None,
    order: str = "shuffled", valid_piece: int = 50, valid_context: int = 20, **more: Any,
) -> TextData:  # fmt: skip
    source = StreamText(
        str(url), cache=None if cache is None else str(cache), cache_gb=cache_gb, shuffle_blocks=3, **more
    )
    data = TextData(source, order=order, window=16, valid_piece=valid_piece, valid_context=valid_context)  # type: ignore[arg-type]
    data.prepare(world or World(), seed=5)
    return data


def trained(data: TextData, steps: range, ranks: int = 1, rank: int = 0, size: int = 6) -> list[Windows]:
    sampler = Sampler(data.train_size, size, 5, rank, ranks, epoch_order=data.epoch_order)
    return list(data.train_batches(sampler, steps))


def tokens_of(batches: list[Windows]) -> torch.Tensor:
    return torch.cat([batch.tokens for batch in batches])


def read_epoch(
    url: str, cache: Path, cache_gb: float, order: str, size: int
) -> list[tuple[list[list[int]], int]]:
    """What each of ``size`` ranks reads of an epoch, a number for each window, and by how many bytes its
    memory grows after the first 20 batches."""

    def rank(world: World) -> tuple[list[list[int]], int]:
        source = StreamText(url, cache=str(cache), cache_gb=cache_gb, shuffle_blocks=4)
        data = TextData(source, order=order, window=1024)  # type: ignore[arg-type]
        data.prepare(world, 3)
        batch_size = 12
        sampler = Sampler(
            data.train_size, batch_size, 3, world.rank, world.size, epoch_order=data.epoch_order
        )
        before, found = 0, []
        for i, batch in enumerate(data.train_batches(sampler, range(data.train_size // batch_size))):
            found.append([zlib.crc32(row.numpy().tobytes()) for row in batch.tokens])
            before = _held() if i == 20 else before
        return found, _held() - before

    return run_ranks(rank, size, 600)


def _held() -> int:
    """Bytes of memory that this process has had at most, of its own."""
    return next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    )
