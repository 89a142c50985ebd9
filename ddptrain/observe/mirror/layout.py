"""What a mirror holds: each file as an object named by its content, and an index that is written last. So
whatever a reader finds in the index is there, whole. Imports no torch."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ddptrain.data.stream.store import Damaged, Store
from ddptrain.errors import UserError
from ddptrain.text import parse_json

INDEX = "mirror.json"
ID = ".mirror"
"""The file of a run's folder that keeps the run's id, and after it the ids of the processes that have sent it
from there, or before it was restored there. A process that sends the run locks it."""
OF_TRACKERS = ("trackers/run.json", "trackers/trackio.sent.json")
"""With which a run that is restored is the same run in a tracker. (W&B and MLflow know themselves what they
have, or have it on the lost node alone.)"""
DOCUMENTS = (
    "config.yaml", "command.txt", "environment.json", "changes.jsonl", "metrics.jsonl", "log.txt",
    "times.json", "summary.json",
    *OF_TRACKERS,
)  # fmt: skip
"""Files of a run's folder that are mirrored beside its checkpoints."""
CHECKPOINT = re.compile(r"best|best-before|step-\d+")
_FORMAT = 1
_IN_CHECKPOINT = re.compile(r"state\.pt|manifest\.json|shards/(\.metadata|__\d+_\d+\.distcp)")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Entry(NamedTuple):
    """A file's content."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Index:
    run: str
    """The run, by an id that its folder keeps."""
    sender: str
    """The process that writes it, by an id."""
    files: Mapping[str, Entry]
    """By their paths in the run's folder."""

    def checkpoints(self) -> list[str]:
        """The folders of steps, the newest first."""
        names = {PurePosixPath(path).parts[1] for path in self.files if path.startswith("checkpoints/step-")}
        return sorted(names, key=lambda name: int(name.removeprefix("step-")), reverse=True)


def entry_of(content: bytes) -> Entry:
    return Entry(hashlib.sha256(content).hexdigest(), len(content))


def object_key(path: str, entry: Entry) -> str:
    """Another one for other content."""
    return f"{path}@{entry.sha256[:16]}"


def is_object_key(key: str) -> bool:
    """Whether an object is one that `object_key` names. Others at the address are somebody else's."""
    path, _, digest = key.rpartition("@")
    return _is_of_a_run(path) and re.fullmatch(r"[0-9a-f]{16}", digest) is not None


def is_mirror(address: str) -> bool:
    """Whether it names a store, or a folder that is a mirror."""
    return "://" in address or os.path.isfile(Path(address) / INDEX)  # false where it may not be read, too


def opened(url: str, key: str, retry_s: float) -> Store:
    """The store of a mirror. key: the config key that names it. Raises UserError where it is no address."""
    return Store(url, retry_s, key, "the run")


def write_index(store: Store, index: Index) -> None:
    files = {path: entry._asdict() for path, entry in sorted(index.files.items())}
    content = {"format": _FORMAT, "run": index.run, "sender": index.sender, "files": files}
    store.write(INDEX, json.dumps(content, indent=1).encode())


def read_index(store: Store) -> Index | None:
    """None where there is none. Raises UserError where it can't be read, or is none of ours."""
    try:
        return _parsed(store.read(INDEX), f"{store.shown}/{INDEX}")
    except FileNotFoundError:
        return None


def _parsed(content: bytes, where: str) -> Index:
    """Raises UserError for anything that `write_index` does not write: anybody may have written it."""
    problem = UserError(f"{where}: is not the index of a mirrored run, or is damaged.", everywhere=False)
    try:
        tree = parse_json(content)
    except ValueError:
        raise problem from None
    match tree:
        case {"format": 1, "run": str(run), "sender": str(sender), "files": dict(entries), **more} if (
            not more
        ):
            pass
        case _:
            raise problem
    files = {}
    for path, entry in entries.items():
        match entry:
            case {"sha256": str(digest), "bytes": int(size), **more} if not more and _DIGEST.fullmatch(
                digest
            ):
                pass
            case _:
                raise problem
        if not _is_of_a_run(path):
            raise problem
        files[path] = Entry(digest, size)
    return Index(run, sender, files)


def _is_of_a_run(path: str) -> bool:
    first, _, rest = path.partition("/")
    name, _, file = rest.partition("/")
    if first != "checkpoints":
        return path in DOCUMENTS
    return CHECKPOINT.fullmatch(name) is not None and _IN_CHECKPOINT.fullmatch(file) is not None


def check_content(digest: str, size: int, entry: Entry) -> None:
    """Raises `Damaged` where what was fetched is not what the index names."""
    if size != entry.bytes:
        raise Damaged(f"it has {size:,} bytes, not {entry.bytes:,}")
    if digest != entry.sha256:
        raise Damaged("it does not match its SHA-256")
