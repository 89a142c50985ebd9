"""Makes a streamed set of any other one: blocks, the small facts of all samples, and a manifest of hashes."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from ddptrain.api.rng import derive_seed
from ddptrain.data.identity import digest, of_tensor
from ddptrain.data.pictures import claim
from ddptrain.data.stream.block_table import Block
from ddptrain.data.stream.manifest import FORMAT, LITDATA, NAME
from ddptrain.data.stream.shards import MOST_BYTES, Sample, index_of_litdata, packed
from ddptrain.distributed.cpu import cores
from ddptrain.errors import UserError
from ddptrain.text import parse_json

_PROGRESS = "progress.jsonl"
_FIRST = b'{"set": '
"""What it begins with."""
_LOOKED_AT = 64
"""Samples by which the usual size of one is told."""


@dataclass(frozen=True, slots=True)
class PartToWrite:
    """count: samples. sample: the i-th, its fields as bytes. columns: small facts of all samples, by name, in
    an order, int64 (count,). fingerprints: what tells each sample from others, without decoding it."""

    name: str
    count: int
    sample: Callable[[int], Sample]
    columns: Callable[[Tensor], Mapping[str, Tensor]]
    fingerprints: Iterable[bytes]


def is_begun(folder: Path) -> bool:
    """Whether a set is being written there, or was when the writer died."""
    with suppress(OSError), (folder / _PROGRESS).open("rb") as progress:
        return progress.read(len(_FIRST)) == _FIRST
    return False


@final
class SetFolder:
    """The folder ``out`` that a set is written to; what an earlier, killed process wrote there of the same
    set is kept.

    made_of: a plain value, another one for each set. Raises UserError where the folder holds anything else.
    """

    def __init__(self, out: Path, made_of: object) -> None:
        self._out = out
        self._done = self._begun(hashlib.sha256(json.dumps(made_of).encode()).hexdigest())

    def blocks(self, part: str, count: int, make: Callable[[int], tuple[bytes, int]]) -> list[Block]:
        """A part's blocks, made by several threads. make: the i-th one's content, and how many samples it
        has."""
        (self._out / part).mkdir(exist_ok=True)
        blocks = []
        with (self._out / _PROGRESS).open("a") as progress, ThreadPoolExecutor(cores()) as pool:
            keys = [f"{part}/chunk-0-{i}.bin" for i in range(count)]
            for block in pool.map(partial(self._block, make), keys, range(count)):
                blocks.append(block)
                if block.key not in self._done:
                    print(json.dumps(block._asdict()), file=progress, flush=True)
        return blocks

    def column(self, key: str, values: Tensor) -> dict[str, Any]:
        """Write a small fact of all samples; how the manifest says it."""
        content = values.contiguous().numpy().tobytes()
        write_file(self._out / key, content)
        dtype = str(values.dtype).removeprefix("torch.")
        digest = hashlib.sha256(content).hexdigest()
        return {"key": key, "dtype": dtype, "shape": list(values.shape), "sha256": digest}

    def finish(self, kind: str, about: Mapping[str, Any], parts: Mapping[str, Any]) -> str:
        """Write the manifest. Returns what to tell the user."""
        manifest = {"format": FORMAT, "kind": kind, "about": about, "parts": parts}
        write_file(self._out / NAME, json.dumps(manifest).encode())
        (self._out / _PROGRESS).unlink()
        return f"{self._out / NAME}: data.source.url={self._out}, or wherever you copy the folder to"

    def _begun(self, digest: str) -> dict[str, Block]:
        """The blocks that are there already, by their keys."""
        progress = self._out / _PROGRESS
        if not progress.exists():
            claim(self._out)
            write_file(progress, (json.dumps({"set": digest}) + "\n").encode())
            return {}
        text = progress.read_text()
        whole = text[: text.rfind("\n") + 1]  # a line without its end was being written
        os.truncate(progress, len(whole.encode()))
        first, *rest = [parse_json(line) for line in whole.splitlines()]
        if first["set"] != digest:
            raise UserError(
                f"out={self._out}: holds a part of another set, or of this one in other blocks. Name a new"
                " folder, or clear this one."
            )
        blocks = {line["key"]: Block(**line) for line in rest}
        return {key: block for key, block in blocks.items() if _size(self._out / key) == block.size}

    def _block(self, make: Callable[[int], tuple[bytes, int]], key: str, i: int) -> Block:
        if key in self._done:
            return self._done[key]
        content, samples = make(i)
        write_file(self._out / key, content)
        return Block(key, samples, len(content), hashlib.sha256(content).hexdigest())


@final
class Writer:
    """Writes to ``out``; what an earlier, killed one has written there is kept.

    fields: name and litdata's format of each. block_mb: about so many 10^6 bytes a block.
    """

    def __init__(
        self, out: Path, kind: str, fields: Mapping[str, str], about: Mapping[str, Any], block_mb: float
    ) -> None:
        self._out = out
        self._kind = kind
        self._fields = fields
        self._about = about
        self._block_bytes = bytes_of_block(block_mb)

    def write(self, parts: Sequence[PartToWrite]) -> Iterator[str]:
        """Yields a line for each thing written. A set is stored shuffled, once: in blocks of one class each,
        as folders would give them, a training would see a few classes at a time."""
        plan = {part.name: self._cut(part) for part in parts}
        facts = {"kind": self._kind, "about": self._about, "fields": list(self._fields)}
        facts_of = {part.name: part.columns(plan[part.name][0]) for part in parts}
        cuts = {
            part.name: [
                *(part.count, plan[part.name][1], digest(part.fingerprints)),
                digest(map(of_tensor, facts_of[part.name].values())),
            ]
            for part in parts
        }
        folder = SetFolder(self._out, [facts, cuts])
        listed: dict[str, Any] = {}
        for part in parts:
            order, step = plan[part.name]
            blocks = folder.blocks(
                part.name, -(-part.count // step), partial(_content, part, order.split(step))
            )
            columns = {
                name: folder.column(f"{part.name}-{name}.bin", values)
                for name, values in facts_of[part.name].items()
            }
            listed[part.name] = {"fields": list(self._fields), "blocks": blocks, "columns": columns}
            index = [(Path(block.key).name, block.samples, block.size) for block in blocks]
            content = index_of_litdata(list(self._fields), list(self._fields.values()), index)
            write_file(self._out / part.name / LITDATA, content)
            size = sum(block.size for block in blocks)
            yield f"{part.name}: {part.count:,} samples in {len(blocks):,} blocks, {size / 1e6:,.1f} MB"
        yield folder.finish(self._kind, self._about, listed)

    def _cut(self, part: PartToWrite) -> tuple[Tensor, int]:
        """The samples' order, and how many make a block."""
        generator = torch.Generator().manual_seed(derive_seed(0, part.count))
        order = torch.randperm(part.count, generator=generator)
        if part.count == 0:
            raise UserError(f"write: the {part.name} part has no sample.")
        looked_at = [sum(map(len, part.sample(i))) for i in order[:_LOOKED_AT].tolist()]
        return order, max(1, round(self._block_bytes * len(looked_at) / max(1, sum(looked_at))))


def bytes_of_block(block_mb: float) -> int:
    """Raises UserError for a size that can't be."""
    if not 0 < block_mb * 1e6 < MOST_BYTES:
        raise UserError(f"block_mb={block_mb}: must be more than 0, and less than {MOST_BYTES // 10**6}.")
    return int(block_mb * 1e6)


def _content(part: PartToWrite, order: Sequence[Tensor], i: int) -> tuple[bytes, int]:
    """The i-th block, and how many samples it has."""
    return packed([part.sample(sample) for sample in order[i].tolist()]), len(order[i])


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def write_file(path: Path, content: bytes) -> None:
    """Aside, flushed, and then renamed."""
    aside = path.with_name(f".{path.name}.part")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except OSError as error:
        raise UserError(
            f"out={path}: can't be written ({error.strerror}). Make room, and start it again."
        ) from error
