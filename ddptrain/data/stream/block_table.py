"""What is known of a part's blocks."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import Tensor

from ddptrain.data.paths import Paths

_DIGEST_BYTES = 32
_UNKNOWN = "00" * _DIGEST_BYTES


class Block(NamedTuple):
    """key: of the object. samples: how many; -1, not known yet. size: bytes; -1, not known. sha256: '' where
    nobody has said it."""

    key: str
    samples: int
    size: int
    sha256: str


@final
class BlockTable(Sequence[Block]):
    """All blocks of a part, in tensors, which a loader's workers share: tuples would be copied to each."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._keys = Paths(Path(), (block.key for block in blocks))
        self._numbers = torch.tensor([[block.samples, block.size] for block in blocks], dtype=torch.int64)
        digests = b"".join(bytes.fromhex(block.sha256 or _UNKNOWN) for block in blocks)
        self._digests = torch.frombuffer(bytearray(digests), dtype=torch.uint8).view(-1, _DIGEST_BYTES)

    @property
    def samples(self) -> Tensor:
        """int64 (blocks,)"""
        return self._numbers[:, 0]

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, i: int) -> Block:  # type: ignore[override]
        samples, size = self._numbers[i].tolist()
        digest = self._digests[i].numpy().tobytes().hex()
        key = self._keys[i].removeprefix("./")
        return Block(key, samples, size, "" if digest == _UNKNOWN else digest)
