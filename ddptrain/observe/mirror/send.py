"""Sends a run's folder to its mirror beside the training (``python -m ddptrain.observe.mirror.send <folder>
<url>``), until its stdin is closed and all is sent. Imports no torch.

Prints a line of JSON for each thing that the run's log should say: ``{"error": ...}``, ``{"sent": step}``.
"""

import fcntl
import json
import os
import resource
import sys
import threading
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from ddptrain.data.stream.store import Store
from ddptrain.errors import UserError, reason
from ddptrain.observe.lock import lock_file
from ddptrain.observe.mirror.layout import (
    CHECKPOINT,
    DOCUMENTS,
    ID,
    Entry,
    Index,
    entry_of,
    is_object_key,
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
_TRIES = 50
"""To find the folder as it is at one moment."""
_KNOWN = 20
"""Processes that a folder remembers."""
_LAST_S = 600.0
"""How long it is tried after the training's end."""


class Taken(Exception):
    """Another process sends to the same mirror, or the folder is another run's now."""


class Sender:
    """Makes the mirror what the folder is, as often as it is asked to. run, before: its id, and those of the
    processes whose mirror this one may go on with; own: this one's."""

    def __init__(self, folder: Path, store: Store, run: str, before: Collection[str], own: str) -> None:
        self._folder = folder
        self._store = store
        self._run = run
        self._before = before
        self._id = own
        self._there: set[str] = set()
        """Objects of the mirror."""
        self._sent: Index | None = None
        self._keeps_old = False
        """The store has refused to delete something."""

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
            if self._is_being_deleted(index):
                raise UserError(f"{self._folder} lacks what was there; {self._store.shown} keeps it.")
            known = read_index(self._store)
            if known is not None and known.run != self._run:
                raise Taken(f"{self._store.shown} holds another run; name another address, or empty it")
            if known is not None and known.sender not in (self._id, *self._before):
                raise Taken(f"another process sends the run to {self._store.shown} now")
            if self._sent is None:
                self._there = set(filter(is_object_key, self._store.keys()))
            for path, (entry, content) in files.items():
                key = object_key(path, entry)
                if key not in self._there:
                    self._store.write(key, content)
                    self._there.add(key)
        if read_index(self._store) != known:  # an upload takes a while
            raise Taken(f"another process sends the run to {self._store.shown} now")
        write_index(self._store, index)
        self._sent, self._before = index, ()
        self._drop(self._there - {object_key(path, entry) for path, entry in index.files.items()})
        newest = index.checkpoints()
        return newest[0] if newest else ""

    def _drop(self, old: set[str]) -> None:
        """What the index does not name any more. Raises UserError where the store refuses, once."""
        try:
            self._store.delete(old)
        except UserError:
            if not self._keeps_old:
                self._keeps_old = True
                raise
        else:
            self._there -= old

    def _is_being_deleted(self, index: Index) -> bool:
        """A file that was there, or the last checkpoint, is gone: a run drops neither."""
        if self._sent is None:
            return False
        lost = {name for name in DOCUMENTS if name in self._sent.files and name not in index.files}
        return bool(lost or (self._sent.checkpoints() and not index.checkpoints()))

    def _has_new_checkpoints(self, index: Index) -> bool:
        sent = {} if self._sent is None else self._sent.files
        return any(
            path.startswith("checkpoints/") and sent.get(path) != entry for path, entry in index.files.items()
        )

    def _snapshot(self, stack: ExitStack) -> dict[str, tuple[Entry, bytes | IO[bytes]]]:
        """Files and their content as they are at one moment: the training writes and drops checkpoints."""
        for _ in range(_TRIES):
            with ExitStack() as own:
                before, files = self._manifests(), dict[str, tuple[Entry, bytes | IO[bytes]]]()
                for name, _inode in before:
                    with suppress(OSError, ValueError, KeyError, TypeError):  # is being dropped, or damaged
                        files |= dict(self._checkpoint(name, own))
                # after the checkpoints: metrics of the steps before them are in it
                for name in DOCUMENTS:
                    with suppress(FileNotFoundError):
                        content = (self._folder / name).read_bytes()
                        files[name] = entry_of(content), content
                if self._manifests() == before:
                    stack.push(own.pop_all())
                    return files
            time.sleep(0.1)
        raise UserError(f"{self._folder}: changes faster than it can be read.")

    def _manifests(self) -> list[tuple[str, int]]:
        """The complete checkpoints' names, each with what becomes another one where it is written anew."""
        manifests = []
        for path in sorted((self._folder / "checkpoints").glob("*/manifest.json")):
            with suppress(FileNotFoundError):
                manifests.append((path.parent.name, path.stat().st_ino))
        return [(name, inode) for name, inode in manifests if CHECKPOINT.fullmatch(name)]

    def _checkpoint(
        self, name: str, stack: ExitStack
    ) -> Iterator[tuple[str, tuple[Entry, bytes | IO[bytes]]]]:
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
    lock_file(lock, fcntl.LOCK_EX)  # an earlier process of a run that was killed may still be sending
    sender, pause, said, until = _sender(folder, store, lock), _LOOKS_EVERY_S, "", float("inf")
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
        except Taken:
            raise
        except Exception as error:  # of any kind, of a store's library or a disk: it may pass
            text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {reason(error)}."
            if text != said:
                said = text
                _say(error=said)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            if time.monotonic() > until:
                return
            if ended:
                time.sleep(pause)


def _sender(folder: Path, store: Store, file: IO[str]) -> Sender:
    """With what the folder knows of the run, and from now on of this process."""
    file.seek(0)
    run, *before = file.read().split() or [uuid.uuid4().hex]
    own = uuid.uuid4().hex
    file.seek(0)
    file.truncate()
    file.write("\n".join([run, *before[-_KNOWN:], own]))
    file.flush()
    return Sender(folder, store, run, before, own)


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
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the files of all ranks are open at once
    try:
        follow(folder, opened(url, "run.mirror", _RETRY_S))
    except Taken as taken:
        _say(error=f"{taken}: nothing more is sent.")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
