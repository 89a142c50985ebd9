"""Text for language models: runs of consecutive tokens, in order or shuffled."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor

from ddptrain.api.recipe import Data
from ddptrain.api.rng import draw_below
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.corpus import TextSource
from ddptrain.data.prefetch import on_device
from ddptrain.data.tokens import Level, Vocabulary, open_tokens, tokens_folder, write_tokens
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
    """A corpus as token files under ``root``, cut into windows.

    level: a token is a byte, or a character.
    order: ``streams`` for recurrent models: the text is a ring, row b of n of the global batch starts at its
    b-th n-th and reads one window after the other, so a state can be carried from window to window; each
    rank owns whole rows. ``shuffled``: each epoch cuts the ring into windows from another place on and
    takes them in random order.
    window: tokens of a training sample.
    valid_piece: the held-out text is scored in pieces of so many tokens, each after up to ``valid_context``
    tokens that are read but not scored, so that no token is judged without a past.
    """

    source: TextSource
    level: Level = "bytes"
    order: Literal["streams", "shuffled"] = "streams"
    window: int = 64
    valid_piece: int = 4096
    valid_context: int = 512
    root: str = "data"

    def __post_init__(self) -> None:
        check_least("data", 1, window=self.window, valid_piece=self.valid_piece)
        check_least("data", 0, valid_context=self.valid_context)

    def prepare(self, world: World, seed: int) -> None:
        self._tokens = open_tokens(once_a_node(world, self._tokens_folder))
        self._device = world.device
        self._seed = seed
        self._check_size()

    @property
    def vocabulary(self) -> Vocabulary:
        return self._tokens.vocabulary

    @property
    def identity(self) -> str:
        facts = f"{self._tokens.digest} {self.order} {self.window}"
        return hashlib.sha256(facts.encode()).hexdigest()

    @property
    def outputs(self) -> Sequence[str]:
        return self.vocabulary.characters or ()

    @property
    def in_streams(self) -> bool:
        """Whether a row goes on where it ended in the step before."""
        return self.order == "streams"

    @property
    def train_size(self) -> int:
        return len(self._tokens.train) // self.window

    @property
    def valid_size(self) -> int:
        return -(
            -(len(self._tokens.valid) - 1) // self.valid_piece
        )  # the first token has nothing to follow from

    @property
    def reads_progress(self) -> bool:
        return False

    def train_batches(self, sampler: Sampler, steps: range) -> Iterator[Windows]:
        size = len(self._tokens.train)
        if self.in_streams and size < sampler.batch_size * self.window:
            raise UserError(
                f"train.batch_size={sampler.batch_size}: makes as many streams of the text, whose {size:,}"
                f" tokens are less than a window of {self.window} for each. Take"
                f" {size // self.window} or fewer."
            )
        starts = self._stream_starts if self.in_streams else self._shuffled_starts
        return self._moved(Windows(self._read(first), rows) for first, rows in starts(sampler, steps))

    def valid_batches(self, chunks: Sequence[range]) -> Iterator[Windows]:
        return self._moved(map(self._pieces, chunks))

    def _moved(self, batches: Iterable[Windows]) -> Iterator[Windows]:
        """Tokens go to the device in their own dtype, an eighth of the bytes."""
        for windows in on_device(batches, self._device):
            yield windows._replace(tokens=windows.tokens.to(torch.int64))

    def preview(self) -> None:
        return None

    def describe(self) -> str:
        kind = "byte values" if self.level == "bytes" else "characters"
        order = "streams" if self.in_streams else "shuffled"
        train, valid = self._tokens.documents
        return (
            f"{self.source.name}: {len(self._tokens.train):,} tokens of {train:,} files to train,"
            f" {len(self._tokens.valid):,} of {valid:,} held out, {len(self.vocabulary)} {kind},"
            f" windows of {self.window} ({order})"
        )

    def _tokens_folder(self) -> Path:
        """Where the tokens are, once they are. The files are looked at here alone: they may be changing."""
        corpus = self.source.corpus(leave_out=Path(self.root))
        folder = tokens_folder(Path(self.root), self.source.name, corpus, self.level)
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
        if valid < 2:
            raise UserError(
                f"data.source: {valid} tokens are held out (every 20th file, or a file's last 20th), too few"
                " to score. Take a longer text."
            )

    def _stream_starts(self, sampler: Sampler, steps: range) -> Iterator[tuple[Tensor, slice]]:
        size, (first, stop) = len(self._tokens.train), sampler.share
        origins = torch.arange(first, stop) * size // sampler.batch_size
        for step in steps:
            row = 0
            for count in sampler.micro_sizes:
                rows = slice(row, row + count)
                yield origins[rows] + step * self.window, rows
                row += count

    def _shuffled_starts(self, sampler: Sampler, steps: range) -> Iterator[tuple[Tensor, None]]:
        for ids, epochs in sampler.samples(steps, torch.device("cpu")):
            shift = draw_below(self.window, self._seed, epochs, torch.zeros_like(ids), _SHIFT)
            yield ids * self.window + shift, None

    def _read(self, starts: Tensor) -> Tensor:
        """Windows of the training ring, in its own dtype, pinned where they go to a GPU."""
        places = starts[:, None] + torch.arange(self.window + 1)
        return self._pinned(self._tokens.train[places % len(self._tokens.train)])

    def _pieces(self, chunk: range) -> Windows:
        """Some pieces of the held-out text with their context; what lies beyond its end is padding."""
        last = len(self._tokens.valid) - 1
        first_scored = torch.arange(chunk.start, chunk.stop)[:, None] * self.valid_piece + 1
        starts = (first_scored - 1 - self.valid_context).clamp(min=0)
        length = min(self.valid_context + self.valid_piece, last)
        places = starts + torch.arange(length + 1)
        targets = places[:, 1:]
        scored = (targets >= first_scored) & (targets < first_scored + self.valid_piece) & (targets <= last)
        tokens = self._tokens.valid[places.clamp(max=last)]
        return Windows(self._pinned(tokens), None, self._pinned(scored))

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self._device.type == "cuda" else tensor
