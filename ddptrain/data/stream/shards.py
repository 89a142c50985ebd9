"""Blocks of samples as files: litdata's chunks, which are also what lies in the cache, and WebDataset's tars.

A chunk begins with the number of samples and where each begins and the last one ends, uint32, little-endian.
A sample is the length of each of its fields, uint32, and then the fields. (litdata 0.2.76, its
streaming/writer.py and item_loader.py.)
"""

import json
import os
import struct
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from ddptrain.data.stream.store import Damaged
from ddptrain.errors import UserError

Sample = Sequence[bytes]
"""A sample's fields."""
MOST_BYTES = 2**32 - 1
"""Of a block: places in it are uint32."""
_PLAIN = ("bytes", "int", "str", "jpeg", "file", "image")
"""litdata's formats of a field whose bytes are read here as they are."""


def packed(samples: Sequence[Sample]) -> bytes:
    """A block of samples."""
    bodies = [struct.pack(f"<{len(fields)}I", *map(len, fields)) + b"".join(fields) for fields in samples]
    at = 4 * (len(bodies) + 2)
    places = [at]
    for body in bodies:
        places.append(at := at + len(body))
    return struct.pack(f"<{len(places) + 1}I", len(bodies), *places) + b"".join(bodies)


def read_samples(path: Path, places: Sequence[int], fields: int) -> list[list[bytes]]:
    """Some samples of a block, each a list of its fields. Raises Damaged where it has none such, and
    FileNotFoundError."""
    with path.open("rb") as file:
        return samples_of(file, places, fields)


def samples_of(file: IO[bytes], places: Sequence[int], fields: int) -> list[list[bytes]]:
    """The same of an open file."""
    try:
        return [_sample(file.fileno(), place, fields) for place in places]
    except struct.error:
        raise Damaged("it is cut short") from None


def _sample(descriptor: int, place: int, fields: int) -> list[bytes]:
    begin, end = struct.unpack("<2I", os.pread(descriptor, 8, 4 + 4 * place))
    body = os.pread(descriptor, end - begin, begin) if begin < end else b""
    lengths = struct.unpack_from(f"<{fields}I", body)
    at = 4 * fields
    if at + sum(lengths) != len(body):
        raise Damaged("its places don't fit together")
    values = []
    for length in lengths:
        values.append(body[at : at + length])
        at += length
    return values


def count_of(file: IO[bytes]) -> int:
    """Samples in a block."""
    return int(struct.unpack("<I", os.pread(file.fileno(), 4, 0))[0])


def from_tar(file: IO[bytes], fields: Sequence[Sequence[str]]) -> bytes:
    """A WebDataset tar as a block: files whose names differ after the first dot only make a sample.

    fields: of each field the endings it may have, without the dot. Raises Damaged for what is no tar, and
    UserError for a sample that lacks one of the fields.
    """
    samples: dict[str, dict[str, bytes]] = {}
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                stem, _, ending = name.partition(".")
                if member.isfile() and stem:
                    content = tar.extractfile(member)
                    assert content is not None
                    samples.setdefault(f"{folder}/{stem}", {})[ending.lower()] = content.read()
    except (tarfile.TarError, EOFError) as error:
        raise Damaged(f"it is no whole tar ({error})") from None
    return packed([_fields_of(name, members, fields) for name, members in samples.items()])


def _fields_of(name: str, members: dict[str, bytes], fields: Sequence[Sequence[str]]) -> list[bytes]:
    chosen = []
    for endings in fields:
        ending = next((ending for ending in endings if ending in members), None)
        if ending is None:
            raise UserError(
                f"{name.strip('/')} in a tar of data.source.url: has no file ending with"
                f" {' or '.join(endings)}, only with {', '.join(sorted(members))}.",
                everywhere=False,
            )
        chosen.append(members[ending])
    return chosen


def fields_of_litdata(config: dict[str, Any], where: str) -> list[str]:
    """The names of a sample's fields, of the "config" in litdata's index.json. Raises UserError for what
    can't be read here."""
    if config.get("compression") or config.get("encryption"):
        raise UserError(f"{where}: its chunks are compressed or encrypted; write them without.")
    formats = [name.partition(":")[0] for name in config["data_format"]]
    if strange := [name for name in formats if name not in _PLAIN]:
        raise UserError(
            f"{where}: holds fields of the format {strange[0]}; must be {', '.join(_PLAIN)}. Give"
            " litdata.optimize samples like {'image': <bytes of a JPEG>, 'label': 3}."
        )
    _, spec = json.loads(config["data_spec"])
    if spec["type"] != "builtins.dict" or any(child["children_spec"] for child in spec["children_spec"]):
        raise UserError(f"{where}: its samples must be dicts, of bytes and numbers, with a name for each.")
    return list(json.loads(spec["context"]))


def index_of_litdata(
    fields: Sequence[str], formats: Sequence[str], blocks: Sequence[tuple[str, int, int]]
) -> bytes:
    """litdata's index.json for blocks of (name, samples, bytes)."""
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    spec = {
        "type": "builtins.dict",
        "context": json.dumps(list(fields)),
        "children_spec": [leaf] * len(fields),
    }
    config = {
        "chunk_bytes": max((size for _, _, size in blocks), default=0), "chunk_size": None,
        "compression": None,
        "data_format": list(formats), "data_spec": json.dumps([1, spec]), "encryption": None,
        "item_loader": "PyTreeLoader",
    }  # fmt: skip
    chunks = [
        {"chunk_bytes": size, "chunk_size": count, "dim": None, "filename": name}
        for name, count, size in blocks
    ]
    return json.dumps({"chunks": chunks, "config": config}).encode()
