"""Makes a streamed set of any other one: blocks, the small facts of all samples, and a manifest of hashes."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from ddptrain.api.rng import mixed
from ddptrain.data.pictures import claim
from ddptrain.data.stream.cache import Block
from ddptrain.data.stream.manifest import FORMAT, LITDATA, NAME
from ddptrain.data.stream.shards import MOST_BYTES, Sample, index_of_litdata, packed
from ddptrain.distributed.cpu import cores
from ddptrain.errors import UserError
from ddptrain.text import parse_json

_PROGRESS = "progress.jsonl"
_LOOKED_AT = 64
"""Samples by which the usual size of one is told."""


@dataclass(frozen=True, slots=True)
class PartToWrite:
    """count: samples. sample: the i-th, its fields as bytes. columns: small facts of all samples, by name, in
    an order, int64 (count,)."""

    name: str
    count: int
    sample: Callable[[int], Sample]
    columns: Callable[[Tensor], Mapping[str, Tensor]]


@final
class Writer:
    """Writes to ``out``; what an earlier, killed one has written there is kept.

    fields: name and litdata's format of each. block_mb: about so many 10^6 bytes a block.
    """

    def __init__(
        self, out: Path, kind: str, fields: Mapping[str, str], about: Mapping[str, Any], block_mb: float
    ) -> None:
        if not 0 < block_mb * 1e6 < MOST_BYTES:
            raise UserError(f"block_mb={block_mb}: must be more than 0, and less than {MOST_BYTES // 10**6}.")
        self._out = out
        self._kind = kind
        self._fields = fields
        self._about = about
        self._block_bytes = int(block_mb * 1e6)

    def write(self, parts: Sequence[PartToWrite]) -> Iterator[str]:
        """Yields a line for each thing written. A set is stored shuffled, once: in blocks of one class each,
        as folders would give them, a training would see a few classes at a time."""
        plan = {part.name: self._cut(part) for part in parts}
        facts = {"kind": self._kind, "about": self._about, "fields": list(self._fields)}
        cuts = {
            part.name: [part.count, plan[part.name][1], _digest_of(part.columns(plan[part.name][0]))]
            for part in parts
        }
        done = self._begun(hashlib.sha256(json.dumps([facts, cuts]).encode()).hexdigest())
        listed: dict[str, Any] = {}
        with (self._out / _PROGRESS).open("a") as progress:
            for part in parts:
                order, step = plan[part.name]
                starts = range(0, part.count, step)
                blocks = []
                with ThreadPoolExecutor(cores()) as pool:
                    ids = [order[start : start + step] for start in starts]
                    keys = [f"{part.name}/chunk-0-{i}.bin" for i in range(len(starts))]
                    for block in pool.map(partial(self._block, part, done), keys, ids):
                        blocks.append(block)
                        if block.key not in done:
                            print(json.dumps(block._asdict()), file=progress, flush=True)
                columns = {
                    name: self._column(part.name, name, of) for name, of in part.columns(order).items()
                }
                listed[part.name] = {"fields": list(self._fields), "blocks": blocks, "columns": columns}
                index = [(Path(block.key).name, block.samples, block.size) for block in blocks]
                content = index_of_litdata(list(self._fields), list(self._fields.values()), index)
                (self._out / part.name).mkdir(exist_ok=True)
                _write(self._out / part.name / LITDATA, content)
                size = sum(block.size for block in blocks)
                yield f"{part.name}: {part.count:,} samples in {len(blocks):,} blocks, {size / 1e6:,.1f} MB"
        manifest = {"format": FORMAT, "kind": self._kind, "about": self._about, "parts": listed}
        _write(self._out / NAME, json.dumps(manifest).encode())
        (self._out / _PROGRESS).unlink()
        yield f"{self._out / NAME}: data.source.url={self._out}, or wherever you copy the folder to"

    def _cut(self, part: PartToWrite) -> tuple[Tensor, int]:
        """The samples' order, and how many make a block."""
        generator = torch.Generator().manual_seed(mixed(0, part.count))
        order = torch.randperm(part.count, generator=generator)
        if part.count == 0:
            raise UserError(f"write: the {part.name} part has no sample.")
        looked_at = [sum(map(len, part.sample(i))) for i in order[:_LOOKED_AT].tolist()]
        return order, max(1, round(self._block_bytes * len(looked_at) / max(1, sum(looked_at))))

    def _begun(self, digest: str) -> dict[str, Block]:
        """The blocks that are there already, by their keys."""
        progress = self._out / _PROGRESS
        if not progress.exists():
            claim(self._out)
            progress.write_text(json.dumps({"set": digest}) + "\n")
            return {}
        lines = progress.read_text().split("\n")[:-1]  # a line without its end was being written
        first, *rest = [parse_json(line) for line in lines]
        if first["set"] != digest:
            raise UserError(
                f"out={self._out}: holds a part of another set, or of this one in other blocks. Name a new"
                " folder, or clear this one."
            )
        blocks = {line["key"]: Block(**line) for line in rest}
        return {key: block for key, block in blocks.items() if _size(self._out / key) == block.size}

    def _block(self, part: PartToWrite, done: Mapping[str, Block], key: str, ids: Tensor) -> Block:
        if key in done:
            return done[key]
        content = packed([part.sample(i) for i in ids.tolist()])
        (self._out / key).parent.mkdir(exist_ok=True)
        _write(self._out / key, content)
        return Block(key, len(ids), len(content), hashlib.sha256(content).hexdigest())

    def _column(self, part: str, name: str, values: Tensor) -> dict[str, Any]:
        key = f"{part}-{name}.bin"
        content = values.contiguous().numpy().tobytes()
        _write(self._out / key, content)
        dtype = str(values.dtype).removeprefix("torch.")
        return {
            "key": key,
            "dtype": dtype,
            "shape": list(values.shape),
            "sha256": hashlib.sha256(content).hexdigest(),
        }


def _digest_of(columns: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for values in columns.values():
        digest.update(values.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def _write(path: Path, content: bytes) -> None:
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
