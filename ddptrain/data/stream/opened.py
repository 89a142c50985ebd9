"""A streamed set made ready on a node: its manifest, the small facts of all samples, and its two parts."""

import hashlib
import json
import logging
import math
import struct
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, NamedTuple, final

import torch
from torch import Tensor

from ddptrain.api.blocks import Blocks
from ddptrain.data.agreement import Relabelling, note_other_labels, places_among, relabelled
from ddptrain.data.disk import exclusive_lock, map_file
from ddptrain.data.stream.block_prefetch import PREFETCH_SHARE
from ddptrain.data.stream.block_table import Block, BlockTable
from ddptrain.data.stream.cache import BlockCache
from ddptrain.data.stream.manifest import LABEL, PICTURE, Manifest, Part, of_tars, read_manifest, tars
from ddptrain.data.stream.samples import StreamSamples
from ddptrain.data.stream.shards import count_of, samples_of
from ddptrain.data.stream.store import Damaged, Store, shown
from ddptrain.errors import UserError, check_least
from ddptrain.text import json_object, replace_file

log = logging.getLogger("ddptrain")

_SAY_EVERY_S = 10.0
_THREADS = 4
_ASKED_AT_ONCE = 32
"""Objects of which a store is asked for size and time."""
_CHOICES = {"classes": "stream", "boxes": "stream_boxes", "masks": "stream_masks", "tokens": "stream_text"}
"""Of the group ``data``, by the kind of set that each reads."""


class Column(NamedTuple):
    """A small fact of all samples, in a file. shape: first dimension, samples."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """The file's values, a copy: one that is mapped from the file can't be sent to a loader's worker."""
        size, dtype = math.prod(self.shape), getattr(torch, self.dtype)
        return (
            map_file(self.file, size, dtype).view(self.shape).clone()
            if size
            else torch.empty(self.shape, dtype=dtype)
        )


class OpenedPart(NamedTuple):
    samples: StreamSamples
    columns: Mapping[str, Column]


class OpenedSet(NamedTuple):
    """about: what the writer noted, of the training part's set; valid_about, of the other's. identity: a hash
    of the samples and of their order."""

    train: OpenedPart
    valid: OpenedPart
    about: Mapping[str, Any]
    valid_about: Mapping[str, Any]
    identity: str


@final
class Streamed:
    """A set in blocks, and the cache it is read through; these are the arguments of all streamed sources.

    url: s3://, gs://, az://, https://, or a folder, that holds ddptrain.json (of ``layout=stream``) or
    litdata's index.json; or WebDataset's tars, like ``s3://bucket/train-{000..099}.tar``. valid_url:
    likewise, for validation: the part that the set there has for it, or all of a set of another program's,
    whose index knows one part only. cache: folder on the node's own
    disk; None reads a set that lies in a folder where it is. cache_gb: most that it may hold, in 10^9 bytes,
    for all who use it.
    shuffle_blocks: blocks whose samples are shuffled together. retry_s: how long a store that fails is asked
    again, in seconds.
    """

    no_skip = "a streamed set is not fetched whole; leave them out where it is written (write ...)"

    def __init__(
        self, url: str | None, valid_url: str | None, cache: str | None, cache_gb: float, shuffle_blocks: int,
        retry_s: float,
    ) -> None:  # fmt: skip
        if not url:
            raise UserError("data.source.url: say where the set lies: data.source.url=s3://bucket/folder")
        check_least("data.source", 1, shuffle_blocks=shuffle_blocks)
        for key, value in (("cache_gb", cache_gb), ("retry_s", retry_s)):
            if not value > 0:
                raise UserError(f"data.source.{key}={value}: must be more than 0.")
        if cache is None and any(
            "://" in address or address.endswith(".tar") for address in (url, valid_url or "")
        ):
            raise UserError(
                "data.source.cache=null: a set is read where it lies only from a folder, and not from tars."
                " Name a folder on this machine's own disk."
            )
        self._url, self._valid_url = url, valid_url
        self._cache = None if cache is None else Path(cache)
        self._limit = int(cache_gb * 1e9)
        self._window = shuffle_blocks
        self._retry_s = retry_s

    def fetch(self) -> None:
        """Bring the index and the columns to this node. Runs in one process a node."""
        for (url, _, part), folder in zip(self._parts, self._index_folders, strict=True):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with exclusive_lock(folder / ".lock"):
                    if part.columns is None:
                        self._index(url, part, folder)
                    for column in (part.columns or {}).values():
                        _fetch_column(self._store(url), column, folder)
            except OSError as error:
                raise UserError(
                    f"data.source.cache={self._cache}: {folder} can't be written ({error.strerror}). Make"
                    " room, or name another folder.",
                    everywhere=False,
                ) from error

    def open(self, *kinds: str) -> OpenedSet:
        """The set, once `fetch` has run on this node. kinds: those that are read; '' is another program's.

        Raises UserError for a set of another kind.
        """
        for key, (url, manifest, _) in zip(("url", "valid_url"), self._parts, strict=True):
            if manifest.kind not in kinds:
                choice = _CHOICES.get(manifest.kind)
                way_out = f"Use data={choice}." if choice else "Write one: ddptrain write ... layout=stream."
                if key == "valid_url":
                    way_out = "It must be of the same kind as data.source.url."
                raise UserError(
                    f"data.source.{key}={shown(url)}: holds a set of {manifest.kind or 'another program'},"
                    f" not of {kinds[0]}. {way_out}"
                )
        (_, manifest, _), (_, valid_manifest, _) = self._parts
        first, second = (
            self._opened(url, part, folder)
            for (url, _, part), folder in zip(self._parts, self._index_folders, strict=True)
        )
        blocks = [list(part.samples.cache.blocks) for part in (first, second)]
        self._check_room(*blocks)
        facts = [manifest.digest, valid_manifest.digest, self._window, blocks]
        identity = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        return OpenedSet(first, second, manifest.about, valid_manifest.about, identity)

    def relabelling(self, opened: OpenedSet, trained: Sequence[str]) -> Relabelling | None:
        """Brings the labels of ``valid_url`` to the classes trained on, by their names; None where one of the
        two has none. The log says where labels change. Raises UserError for a class that is not trained on.
        """
        own = opened.valid_about.get("classes")
        if self._valid_url is None or not own or not trained:
            return None
        where, of = f"data.source.valid_url={shown(self._valid_url)}", f"data.source.url={shown(self._url)}"
        places = places_among(trained, own, where, of)
        note_other_labels(places, where, of)
        return partial(relabelled, places=places, classes=len(trained), where=where)

    @cached_property
    def _parts(self) -> list[tuple[str, Manifest, Part]]:
        """For training and for validation: the folder's address, and what it holds."""
        url, manifest = self._manifest(self._url)
        if self._valid_url is not None:
            valid_url, valid = self._manifest(self._valid_url)
            held = valid.train if valid.valid is None else valid.valid
            return [(url, manifest, manifest.train), (valid_url, valid, held)]
        if manifest.valid is None:
            raise UserError(
                f"data.source.url={shown(self._url)}: its index knows one part only. Name the one for"
                " validation: data.source.valid_url=..."
            )
        return [(url, manifest, manifest.train), (url, manifest, manifest.valid)]

    def _manifest(self, url: str) -> tuple[str, Manifest]:
        folder, keys = tars(url)
        return folder, of_tars(keys) if keys else read_manifest(self._store(folder))

    def _store(self, url: str) -> Store:
        return Store(url, self._retry_s)

    def _blocks(self, url: str, part: Part) -> BlockCache:
        store = self._store(url)
        folder = None if self._cache is None else self._cache / "blocks"
        return BlockCache(store, BlockTable(part.blocks), folder, self._limit, part.convert)

    def _opened(self, url: str, part: Part, folder: Path) -> OpenedPart:
        if part.columns is None:
            part = _indexed(part, folder)
        cache = self._blocks(url, part)
        columns = {
            name: Column(_file_of(column, folder), column["dtype"], tuple(column["shape"]))
            for name, column in (part.columns or {}).items()
        }
        return OpenedPart(
            StreamSamples(cache, part.fields, Blocks(cache.blocks.samples, self._window)), columns
        )

    def _check_room(self, train: list[Block], valid: list[Block]) -> None:
        if self._cache is None:
            return
        room = PREFETCH_SHARE * self._limit
        if (size := max((block.size for block in valid), default=0)) > room:
            raise UserError(
                f"data.source.cache_gb={self._limit / 1e9:g}: a block of the validation set has"
                f" {size / 1e9:.3g} GB. Make the cache larger, or write that set with a smaller block_mb."
            )
        largest = sorted((block.size for block in train), reverse=True)[: self._window]
        if sum(largest) > room:
            raise UserError(
                f"data.source.cache_gb={self._limit / 1e9:g}: samples are shuffled within"
                f" data.source.shuffle_blocks={self._window} blocks, which are up to"
                f" {sum(largest) / 1e9:.3g} GB together and must be there at once, better twice. Make the"
                " cache larger, or shuffle fewer blocks."
            )

    @cached_property
    def _index_folders(self) -> list[Path]:
        """Of both parts: another folder for each place, and for each state of what is indexed there."""
        return [self._index_folder(url, manifest, part) for url, manifest, part in self._parts]

    def _index_folder(self, url: str, manifest: Manifest, part: Part) -> Path:
        store = self._store(url)
        place = store.url if store.folder is None else str(store.folder.resolve())
        versions: list[str] = []
        if part.columns is None:  # ddptrain's own manifest has the SHA-256 of all that belongs to the set
            with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
                versions = list(pool.map(store.version, [block.key for block in part.blocks]))
        made_of = json.dumps([place, manifest.digest, versions])
        name = hashlib.sha256(made_of.encode()).hexdigest()[:16]
        return (self._cache or Path("data/stream")) / "index" / name

    def _index(self, url: str, part: Part, folder: Path) -> None:
        """Read another program's set once: how many samples its blocks hold, and the samples' labels."""
        if json_object(folder / _INDEX):
            return
        label = next((i for i, name in enumerate(part.fields) if name in LABEL), None)
        if label is None or not any(name in PICTURE for name in part.fields):
            raise UserError(
                f"data.source.url={shown(url)}: its samples have the fields {', '.join(part.fields)}; a"
                f" picture ({' or '.join(PICTURE)}) and a label ({' or '.join(LABEL)}) are needed."
            )
        cache = self._blocks(url, part)
        log.info("data       %s is read once, to index it: %d blocks", shown(url), len(part.blocks))

        def look(file: IO[bytes]) -> list[int]:
            samples = samples_of(file, range(count_of(file)), len(part.fields))
            return [_number(sample[label], part.int64_label) for sample in samples]

        def learnt(i: int) -> tuple[Block, list[int]]:
            try:
                return cache.learn(i, look)
            except UserError as error:
                raise UserError(f"{part.blocks[i].key}: {error}", everywhere=error.everywhere) from error

        labels: list[int] = []
        blocks, said = [], time.monotonic()
        with ThreadPoolExecutor(_THREADS) as pool:
            for known, block_labels in pool.map(learnt, range(len(part.blocks))):
                labels += block_labels
                blocks.append(known._replace(samples=len(block_labels)))
                if time.monotonic() - said > _SAY_EVERY_S:
                    said = time.monotonic()
                    log.info("data       %d of %d blocks", len(blocks), len(part.blocks))
        written = torch.tensor(labels, dtype=torch.int64).numpy().tobytes()
        replace_file(folder / "labels", written)
        column = {"key": "labels", "dtype": "int64", "shape": [len(labels)], "sha256": _hex(written)}
        replace_file(folder / _INDEX, json.dumps({"blocks": blocks, "columns": {"labels": column}}).encode())


_INDEX = "index.json"


def _indexed(part: Part, folder: Path) -> Part:
    try:
        index = json.loads((folder / _INDEX).read_text())
    except OSError as error:
        raise UserError(
            f"{folder / _INDEX}: can't be read ({error.strerror}). The set that it is an index of has changed"
            " since the run began. Start again.",
            everywhere=False,
        ) from error
    return replace(part, blocks=[Block(*block) for block in index["blocks"]], columns=index["columns"])


def _number(label: bytes, int64: bool) -> int:
    """As litdata writes a number, or in words, as tars have it."""
    try:
        return int(struct.unpack("<q", label)[0]) if int64 else int(label)
    except (ValueError, struct.error):
        raise UserError(f"a label is {label[:20]!r}; must be a whole number.", everywhere=False) from None


def _fetch_column(store: Store, column: Mapping[str, Any], folder: Path) -> None:
    file = _file_of(column, folder)
    if file.exists() and _hex(file.read_bytes()) == column["sha256"]:
        return

    def check(content: bytes) -> None:
        if _hex(content) != column["sha256"]:
            raise Damaged("its SHA-256 is another one than the manifest says")

    replace_file(file, store.read(column["key"], check))


def _file_of(column: Mapping[str, Any], folder: Path) -> Path:
    return folder / str(column["key"]).replace("/", "-")


def _hex(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
