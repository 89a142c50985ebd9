"""Text for language models: runs of consecutive tokens, in order or shuffled."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor

from ddptrain.api.blocks import Blocks
from ddptrain.api.order import EpochOrder, Shuffled
from ddptrain.api.recipe import Data, Loading
from ddptrain.api.rng import draw_below
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.agreement import note_checkpoints_own
from ddptrain.data.prefetch import on_device
from ddptrain.data.stream.block_prefetch import PREFETCH_SHARE, Need, validation_share
from ddptrain.data.stream.samples import training_needs, training_positions
from ddptrain.data.stream.text import OpenedText, StreamText
from ddptrain.data.stream.tokens import TokenBlocks
from ddptrain.data.stream.write_text import write_text
from ddptrain.data.text.corpus import TextSource
from ddptrain.data.text.tokenizer import BYTES, Tokenizer, read_tokenizer
from ddptrain.data.text.tokens import (
    Level,
    Tokens,
    Vocabulary,
    open_tokens,
    tokens_folder,
    write_tokens,
)
from ddptrain.distributed.comm import once_a_node
from ddptrain.errors import UserError, check_least

_SHIFT = 0  # Purpose of a draw: where an epoch's first window begins


class Windows(NamedTuple):
    """Runs of consecutive tokens; the model is given ``tokens[:, :-1]`` and has to tell ``tokens[:, 1:]``.

    tokens: int64 (n, length + 1).
    rows: in training, which of this rank's rows of the global batch these are.
    scored: in validation, bool (n, length): the targets that count; the others are context or padding.
    """

    tokens: Tensor
    rows: slice | None = None
    scored: Tensor | None = None


@final
@dataclass(eq=False)
class TextData(Data):
    """A corpus as token files under ``root``, or streamed from elsewhere, cut into windows.

    level: a token is a byte, or a character; a streamed text has tokens of its own.
    order: ``streams`` for recurrent models: the text is a ring, row b of n of the global batch starts at its
    b-th n-th and reads one window after the other, so a state can be carried from window to window; each
    rank owns whole rows. ``shuffled``: each epoch cuts the ring into windows from another place on and
    takes them in random order; of a streamed text, it does so with each block, and takes those of a few
    blocks in random order.
    window: tokens of a training sample.
    valid_piece: the held-out text is scored in pieces of so many tokens, each after up to ``valid_context``
    tokens that are read but not scored, so that no token is judged without a past.
    """

    source: TextSource | StreamText
    level: Level = "bytes"
    order: Literal["streams", "shuffled"] = "streams"
    window: int = 64
    valid_piece: int = 4096
    valid_context: int = 512
    root: str = "data"

    def __post_init__(self) -> None:
        check_least("data", 1, window=self.window, valid_piece=self.valid_piece)
        check_least("data", 0, valid_context=self.valid_context)
        self._vocabulary: Vocabulary | Tokenizer | None = None
        self._prepared: _Prepared | None = None

    def prepare(self, world: World, seed: int) -> None:
        if isinstance(self.source, StreamText):
            once_a_node(world, self.source.fetch)
            tokens: Tokens | OpenedText = self.source.open()
        else:
            tokens = open_tokens(once_a_node(world, partial(self._tokens_folder, self.source)))
        self._vocabulary = tokens.vocabulary
        self._prepared = _Prepared(tokens, world, seed)
        self._check_size()

    @property
    def _ready(self) -> "_Prepared":
        assert self._prepared is not None, "prepare comes first"
        return self._prepared

    @property
    def _tokens(self) -> Tokens | OpenedText:
        return self._ready.tokens

    def metadata(self) -> Mapping[str, Any]:
        vocabulary = self.vocabulary
        if isinstance(vocabulary, Tokenizer):
            return {"tokenizer": vocabulary.saved, "window": self.window}
        return {"characters": vocabulary.characters, "window": self.window}

    def adopt_metadata(self, metadata: Mapping[str, Any]) -> None:
        if self.window != metadata["window"]:
            note_checkpoints_own("data.window", self.window, metadata["window"])
        self.window = int(metadata["window"])

    def load_metadata(self, metadata: Mapping[str, Any], world: World) -> None:
        if "tokenizer" in metadata:
            self._vocabulary = Tokenizer(str(metadata["tokenizer"]), "the checkpoint's tokenizer")
        else:
            self._vocabulary = Vocabulary(metadata["characters"])
        self.adopt_metadata(metadata)

    @property
    def vocabulary(self) -> Vocabulary | Tokenizer:
        assert self._vocabulary is not None, "prepare or load_metadata comes first"
        return self._vocabulary

    @property
    def identity(self) -> str:
        sizes = len(self._tokens.train), len(self._tokens.valid)
        judged = self.valid_piece, self.valid_context
        facts = f"{self._tokens.digest} {self.order} {self.window} {sizes} {judged}"
        return hashlib.sha256(facts.encode()).hexdigest()

    @property
    def outputs(self) -> Sequence[str]:
        vocabulary = self.vocabulary
        return vocabulary.names if isinstance(vocabulary, Tokenizer) else vocabulary.characters or ()

    @property
    def in_streams(self) -> bool:
        """Whether a row goes on where it ended in the step before."""
        return self.order == "streams"

    @property
    def train_size(self) -> int:
        order = self.epoch_order
        return int(order.sizes.sum()) if isinstance(order, Blocks) else len(self._tokens.train) // self.window

    @property
    def epoch_order(self) -> EpochOrder:
        train = self._tokens.train
        if isinstance(train, TokenBlocks) and not self.in_streams:
            return train.windows(self.window)
        return Shuffled()

    @property
    def loading(self) -> Loading:
        train = self._tokens.train
        return Loading(reading=train.reading) if isinstance(train, TokenBlocks) else Loading()

    @property
    def valid_size(self) -> int:
        return -(
            -(len(self._tokens.valid) - 1) // self.valid_piece
        )  # the first token has nothing to follow from

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Windows]:
        size = len(self._tokens.train)
        if self.in_streams and size < sampler.batch_size * self.window:
            raise UserError(
                f"train.batch_size={sampler.batch_size}: makes as many streams of the text, whose {size:,}"
                f" tokens are less than a window of {self.window} for each. Take"
                f" {size // self.window} or fewer."
            )
        train = self._tokens.train
        if isinstance(train, TokenBlocks):
            if self.in_streams:
                # not this rank's own rows: all must come to the same answer
                ranks = self._ready.world.local_size
                train.check_room(-(-sampler.batch_size * ranks // sampler.world_size), ranks)
            return self._moved(self._streamed(train, sampler, steps))
        starts = self._stream_starts if self.in_streams else self._shuffled_starts
        return self._moved(
            Windows(self._pinned(_read(train, first, self.window + 1)), rows)
            for first, rows in starts(sampler, steps)
        )

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Windows]:
        valid = self._tokens.valid
        if isinstance(valid, TokenBlocks):
            needs = (self._need(valid, i, chunk) for i, chunk in enumerate(chunks))
            return self._moved(map(self._pieces, valid.fetching(chunks, count(), needs, validation_share())))
        return self._moved(map(self._pieces, chunks))

    def write(
        self, folder: Path, layout: Literal["stream"] = "stream", block_mb: float = 32.0,
        tokenizer: str = BYTES,
    ) -> Iterator[str]:  # fmt: skip
        """As blocks of tokens that ``data=stream_text`` reads from a bucket, a web server or a folder.

        block_mb: about so many 10^6 bytes a block. tokenizer: ``bytes``, or a file of the tokenizers library,
        its tokenizer.json.
        """
        if isinstance(self.source, StreamText):
            raise UserError("write: this text is in blocks already. Name the text: data=text.")
        if self.level != "bytes":
            raise UserError(
                f"data.level={self.level}: a streamed text has bytes, or the tokens of tokenizer=<file>."
            )
        corpus = self.source.corpus(Path(self.root))
        yield from write_text(folder, corpus, read_tokenizer(tokenizer), block_mb)

    def _moved(self, batches: Iterable[Windows]) -> Iterator[Windows]:
        """Tokens go to the device in their own dtype, an eighth of the bytes."""
        for windows in on_device(batches, self._ready.world.device):
            yield windows._replace(tokens=windows.tokens.to(torch.int64))

    def preview(self) -> None:
        return None

    def describe(self) -> str:
        kind = "byte values" if self.level == "bytes" else "characters"
        if isinstance(self.vocabulary, Tokenizer):
            kind = "kinds of tokens"
        order = "streams" if self.in_streams else "shuffled"
        train, valid = self._tokens.documents
        return (
            f"{self.source.name}: {len(self._tokens.train):,} tokens of {train:,} files to train,"
            f" {len(self._tokens.valid):,} of {valid:,} held out, {len(self.vocabulary)} {kind},"
            f" windows of {self.window} ({order})"
        )

    def _tokens_folder(self, source: TextSource) -> Path:
        """Where the tokens are, once they are. The files are looked at here alone: they may be changing."""
        corpus = source.corpus(Path(self.root))
        folder = tokens_folder(Path(self.root), source.name, corpus, self.level)
        write_tokens(folder, corpus, self.level)
        return folder

    def _check_size(self) -> None:
        train, valid = len(self._tokens.train), len(self._tokens.valid)
        if train + valid == 0:
            raise UserError("data.source: the text is empty.")
        if train <= self.window:
            raise UserError(
                f"data.window={self.window}: the text to train on has {train} tokens (and {valid} are held"
                " out), and a window takes one more than its length. Take a longer text or a shorter window."
            )
        if isinstance(self.epoch_order, Blocks) and int(self.epoch_order.sizes.min()) == 0:
            raise UserError(
                f"data.window={self.window}: a block of the set has fewer tokens than a window, and a"
                " window lies within one block. Take a shorter window, or write larger blocks (block_mb=...)."
            )
        if valid < 2:
            raise UserError(
                f"data.source: {valid} tokens are held out (every 20th file, or a file's last 20th), too few"
                " to score. Take a longer text."
            )

    def _stream_starts(self, sampler: Sampler, steps: range) -> Iterator[tuple[Tensor, slice]]:
        origins = self._origins(sampler)
        for step in steps:
            row = 0
            for size in sampler.micro_sizes:
                rows = slice(row, row + size)
                yield origins[rows] + step * self.window, rows
                row += size

    def _origins(self, sampler: Sampler) -> Tensor:
        """int64 (rows,): where this rank's rows begin."""
        return torch.arange(*sampler.share) * len(self._tokens.train) // sampler.batch_size

    def _shuffled_starts(self, sampler: Sampler, steps: range) -> Iterator[tuple[Tensor, None]]:
        for ids, epochs in sampler.samples(steps, torch.device("cpu")):
            shift = draw_below(self.window, self._ready.seed, epochs, torch.zeros_like(ids), _SHIFT)
            yield ids * self.window + shift, None

    def _streamed(self, train: TokenBlocks, sampler: Sampler, steps: range) -> Iterator[Windows]:
        """Windows out of blocks that are fetched ahead of them."""
        if isinstance(sampler.epoch_order, Blocks):
            ids = sampler.samples(steps, torch.device("cpu"))
            needs = training_needs(sampler.epoch_order, sampler, steps)
            for some, epochs in train.fetching(
                ids, training_positions(sampler, steps), needs, PREFETCH_SHARE
            ):
                yield Windows(self._pinned(train.read_windows(some, epochs, self.window, self._ready.seed)))
            return
        positions = (step for step in steps for _ in sampler.micro_sizes)
        needs = train.needs_of_streams(self._origins(sampler), self.window, steps)
        starts = self._stream_starts(sampler, steps)
        # the ranks of a node fetch other blocks into the same cache
        share = PREFETCH_SHARE / self._ready.world.local_size
        for some, rows in train.fetching(starts, positions, needs, share):
            yield Windows(self._pinned(train.read(some, self.window + 1)), rows)

    def _need(self, valid: TokenBlocks, i: int, chunk: range) -> Need:
        """The blocks of some pieces of the held-out text."""
        begin = max(0, chunk.start * self.valid_piece - self.valid_context)
        stop = min(len(valid), chunk.stop * self.valid_piece + 1)
        return valid.needs_of(i, torch.tensor([begin]), stop - begin)

    def _pieces(self, chunk: range) -> Windows:
        """Some pieces of the held-out text with their context; what lies beyond its end is padding."""
        last = len(self._tokens.valid) - 1
        first_scored = torch.arange(chunk.start, chunk.stop)[:, None] * self.valid_piece + 1
        starts = (first_scored - 1 - self.valid_context).clamp(min=0)
        length = min(self.valid_context + self.valid_piece, last)
        places = starts + torch.arange(length + 1)
        targets = places[:, 1:]
        scored = (targets >= first_scored) & (targets < first_scored + self.valid_piece) & (targets <= last)
        tokens = _read(self._tokens.valid, starts[:, 0], length + 1)
        return Windows(self._pinned(tokens), None, self._pinned(scored))

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self._ready.world.device.type == "cuda" else tensor


class _Prepared(NamedTuple):
    tokens: Tokens | OpenedText
    world: World
    seed: int


def _read(ring: Tensor | TokenBlocks, starts: Tensor, length: int) -> Tensor:
    """(n, length) in their own dtype: runs of consecutive tokens, around the ring. starts: int64 (n,)."""
    if isinstance(ring, TokenBlocks):
        return ring.read(starts, length)
    return ring[(starts[:, None] + torch.arange(length)) % len(ring)]
