"""What a set consists of: ddptrain's own manifest, litdata's index.json, or the tars of a pattern."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import IO, Any

from ddptrain.data.stream.block_table import Block
from ddptrain.data.stream.shards import fields_of_litdata, from_tar
from ddptrain.data.stream.store import Store
from ddptrain.errors import UserError
from ddptrain.text import parse_json

NAME, LITDATA = "ddptrain.json", "index.json"
FORMAT = 1
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
PICTURE = ("image", "img", "jpg", "jpeg", "png", "webp")
"""What a field with a picture may be called, or a file's ending in a tar."""
LABEL = ("label", "class", "cls", "target")


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a set as it lies in the store.

    columns: small facts of all samples, by name: the key of a file, what it holds ("int64", ...), its shape
    and SHA-256; None: another program's set, which has to be read once. convert: makes a block of an object,
    where that is none.
    """

    fields: Sequence[str]
    blocks: Sequence[Block]
    int64_label: bool = False
    """Whether a label is a number of 8 bytes, and not a word."""
    columns: Mapping[str, Mapping[str, Any]] | None = None
    convert: Callable[[IO[bytes]], bytes] | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """kind: classes, boxes, masks, tokens; '' where nobody has said it. about: what else the writer noted.
    digest: of all that was read."""

    kind: str
    train: Part
    valid: Part | None
    about: Mapping[str, Any]
    digest: str


def read_manifest(store: Store) -> Manifest:
    """Of the set at ``store``. Raises UserError where there is none that can be read."""
    refused: UserError | None = None
    for name, make in ((NAME, _own), (LITDATA, _litdata)):
        try:
            content = store.read(name)
        except FileNotFoundError:
            continue
        except UserError as error:  # S3 refuses what is missing to those who may not list a bucket
            refused = refused or error
            continue
        try:
            return make(
                parse_json(content.decode()), f"{store.shown}/{name}", hashlib.sha256(content).hexdigest()
            )
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{store.shown}/{name}: is no index of a set ({error!r}).") from error
    if refused is not None:
        raise refused
    if store.folder is not None and not store.folder.is_dir():
        what = "is a file" if store.folder.exists() else "there is no such folder"
        raise UserError(f"data.source.url={store.shown}: {what}. Name the one that the set was written to.")
    raise UserError(
        f"data.source.url={store.shown}: holds neither {NAME} (`python -m ddptrain write ... layout=stream`)"
        f" nor {LITDATA} (litdata's). Name the folder that has one of them, or tars:"
        " 'data.source.url=\".../{000..099}.tar\"'."
    )


def tars(url: str) -> tuple[str, list[str]]:
    """The folder and the keys of a pattern like ``s3://bucket/set/train-{000..099}.tar``; no keys where it is
    none."""
    folder, _, name = url.rpartition("/")
    if not name.endswith(".tar"):
        return url, []
    between = _BRACES.split(name)[::3]
    numbers = [
        [str(i).zfill(len(first)) for i in range(int(first), int(last) + 1)]
        for first, last in _BRACES.findall(name)
    ]
    return folder, [_joined(between, chosen) for chosen in product(*numbers)]


def _joined(between: Sequence[str], numbers: Sequence[str]) -> str:
    return between[0] + "".join(map("".join, zip(numbers, between[1:], strict=True)))


def of_tars(keys: Sequence[str]) -> Manifest:
    """A set of tars; how many samples they hold is not known yet."""
    convert = partial(from_tar, fields=[PICTURE, LABEL])
    part = Part(["image", "label"], [Block(key, -1, -1, "") for key in keys], convert=convert)
    return Manifest("classes", part, None, {}, hashlib.sha256(json.dumps(list(keys)).encode()).hexdigest())


def _own(index: Mapping[str, Any], where: str, digest: str) -> Manifest:
    if index["format"] != FORMAT:
        raise UserError(f"{where}: has format {index['format']}; this ddptrain reads {FORMAT}.")
    parts = {name: _part(part) for name, part in index["parts"].items()}
    return Manifest(index["kind"], parts["train"], parts.get("valid"), index["about"], digest)


def _part(part: Mapping[str, Any]) -> Part:
    return Part(part["fields"], [Block(*block) for block in part["blocks"]], columns=part["columns"])


def _litdata(index: Mapping[str, Any], where: str, digest: str) -> Manifest:
    fields = fields_of_litdata(index["config"], where)
    formats = dict(zip(fields, index["config"]["data_format"], strict=True))
    numbers = any(formats[name] == "int" for name in fields if name in LABEL)
    blocks = [
        Block(chunk["filename"], chunk["chunk_size"], chunk["chunk_bytes"], "") for chunk in index["chunks"]
    ]
    return Manifest("", Part(fields, blocks, numbers), None, {}, digest)
