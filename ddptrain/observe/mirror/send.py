"""Sends a run's folder to its mirror beside the training (``python -m ddptrain.observe.mirror.send <folder>
<url>``), until its stdin is closed and all is sent. Imports no torch.

Prints a line of JSON for each thing that the run's log should say: ``{"error": ...}``, ``{"sent": step}``.
"""

import fcntl
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from ddptrain.data.stream.store import Store
from ddptrain.errors import UserError
from ddptrain.observe.mirror.layout import (
    CHECKPOINT,
    DOCUMENTS,
    ID,
    INDEX,
    Entry,
    Index,
    entry_of,
    object_key,
    opened,
    read_index,
    write_index,
)

_NICE = 10
_LOOKS_EVERY_S = 1.0
_DOCUMENTS_EVERY_S = 30.0
"""Between two times that metrics and log are sent without a checkpoint."""
_LONGEST_PAUSE_S = 30.0
_RETRY_S = 10.0
_LAST_S = 600.0
"""How long it is tried after the training's end."""


class Taken(Exception):
    """Another process sends to the same mirror, or the folder is another run's now."""


class Sender:
    """Makes the mirror what the folder is, as often as it is asked to. run: its id."""

    def __init__(self, folder: Path, store: Store, run: str) -> None:
        self._folder = folder
        self._store = store
        self._run = run
        self._id = uuid.uuid4().hex
        self._there: set[str] = set()
        """Objects of the mirror."""
        self._sent: Index | None = None

    def send(self, ended: bool = True) -> str | None:
        """What is new, and then the index; then what the index does not name is deleted. ended: also where
        documents alone are new. Returns the newest checkpoint's name, None where nothing was sent.

        Raises UserError as `Store` does, Taken where the mirror is another one's now.
        """
        with ExitStack() as stack:
            files = self._snapshot(stack)
            index = Index(self._run, self._id, {path: entry for path, (entry, _) in files.items()})
            if index == self._sent or not (ended or self._has_new_checkpoints(index)):
                return None
            known = read_index(self._store)
            if known is not None and known.run != self._run:
                raise Taken(f"{self._store.shown} holds another run; name another address, or empty it")
            if self._sent is None:  # from now on it is this process' mirror
                self._there = self._store.keys()
            elif known is not None and known.sender != self._id:
                raise Taken(f"another process sends the run to {self._store.shown} now")
            for path, (entry, content) in files.items():
                key = object_key(path, entry)
                if key not in self._there:
                    self._store.write(key, content)
                    self._there.add(key)
        write_index(self._store, index)
        self._sent = index
        old = self._there - {object_key(path, entry) for path, entry in index.files.items()} - {INDEX}
        self._store.delete(old)
        self._there -= old
        newest = index.checkpoints()
        return newest[0] if newest else ""

    def _has_new_checkpoints(self, index: Index) -> bool:
        sent = {} if self._sent is None else self._sent.files
        return any(
            path.startswith("checkpoints/") and sent.get(path) != entry for path, entry in index.files.items()
        )

    def _snapshot(self, stack: ExitStack) -> dict[str, tuple[Entry, bytes | IO[bytes]]]:
        """Files and their content as they are at one moment: the training writes and drops checkpoints."""
        while True:
            before = self._manifests()
            try:
                checkpoints = dict(self._checkpoints(stack))
                # after the checkpoints: metrics of the steps before them are in it
                documents = {
                    name: (self._folder / name).read_bytes()
                    for name in DOCUMENTS
                    if (self._folder / name).is_file()
                }
            except FileNotFoundError:
                continue
            if self._manifests() == before:
                return {**checkpoints, **{name: (entry_of(of), of) for name, of in documents.items()}}

    def _manifests(self) -> list[tuple[str, int]]:
        """The complete checkpoints' names, each with what becomes another one where it is written anew."""
        found = []
        for path in sorted((self._folder / "checkpoints").glob("*/manifest.json")):
            with suppress(FileNotFoundError):
                found.append((path.parent.name, path.stat().st_ino))
        return [(name, inode) for name, inode in found if CHECKPOINT.fullmatch(name)]

    def _checkpoints(self, stack: ExitStack) -> Iterator[tuple[str, tuple[Entry, bytes | IO[bytes]]]]:
        for name, _ in self._manifests():
            inside = self._folder / "checkpoints" / name
            manifest = (inside / "manifest.json").read_bytes()
            yield f"checkpoints/{name}/manifest.json", (entry_of(manifest), manifest)
            for file, about in json.loads(manifest)["files"].items():
                content = stack.enter_context((inside / file).open("rb"))  # stays, though it be deleted
                yield f"checkpoints/{name}/{file}", (Entry(about["sha256"], about["bytes"]), content)


def follow(folder: Path, store: Store) -> None:
    """Until stdin is closed, and then what is left."""
    over = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    rank, lock = os.getppid(), (folder / ID).open("a+")
    fcntl.flock(lock, fcntl.LOCK_EX)  # an earlier process of a run that was killed may still be sending
    sender, pause, said, until = Sender(folder, store, _id_in(lock)), _LOOKS_EVERY_S, "", float("inf")
    documents_at = time.monotonic()
    while True:
        # what the rank has forked may hold the pipe open
        ended = over.wait(pause) or os.getppid() != rank
        if not _is_still(folder, lock):
            raise Taken("the run's folder was deleted or replaced")
        if ended and until == float("inf"):
            until = time.monotonic() + _LAST_S
        all_of_it = ended or time.monotonic() - documents_at > _DOCUMENTS_EVERY_S
        try:
            sent = sender.send(all_of_it)
            if all_of_it:
                documents_at = time.monotonic()
            if said or sent:
                _say(sent=sent or "")
            said, pause = "", _LOOKS_EVERY_S
            if ended:
                return
        except UserError as error:
            if str(error) != said:
                said = str(error)
                _say(error=said)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            if time.monotonic() > until:
                return
            if ended:
                time.sleep(pause)


def _id_in(file: IO[str]) -> str:
    """The run's; a new one where there is none."""
    file.seek(0)
    if known := file.read():
        return known
    new = uuid.uuid4().hex
    file.write(new)
    file.flush()
    return new


def _is_still(folder: Path, lock: IO[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(lock.fileno()), (folder / ID).stat())
    except OSError:
        return False


def _say(**facts: str) -> None:
    with suppress(BrokenPipeError):  # the run is gone
        print(json.dumps(facts), flush=True)


def main(folder: Path, url: str) -> None:
    os.nice(_NICE)
    try:
        follow(folder, opened(url, "run.mirror", _RETRY_S))
    except Taken as taken:
        _say(error=f"{taken}: nothing more is sent.")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
