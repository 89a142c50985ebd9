"""A run's folder from its mirror."""

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ddptrain.data.disk import exclusive_lock
from ddptrain.data.stream.store import Store, UnusableObject
from ddptrain.errors import UserError
from ddptrain.observe.mirror.layout import (
    DOCUMENTS,
    ID,
    OF_TRACKERS,
    Entry,
    Index,
    check_content,
    object_key,
    opened,
    read_index,
)

log = logging.getLogger("ddptrain")

_RETRY_S = 60.0
_PART, _MARK = ".restoring", ".restored"
"""A folder beside what is restored, until it is whole; a file, until the run has begun with it."""


def restore(url: str, folder: Path) -> bool:
    """Bring a run that goes on to a folder without checkpoints. Returns False where the mirror has none.

    What is damaged there is left out. Raises UserError where the store can't be read, or has no whole
    checkpoint any more.
    """
    store = opened(url, "run.mirror", _RETRY_S)
    _check_apart(store, folder)
    index = read_index(store)
    if index is None:
        store.keys()  # raises where there is no such bucket
        return False
    part = folder / _PART
    try:
        index, problems = _fetched(store, index, lambda index: _bring_run(store, index, part))
        _move(store, index, problems, part, folder)
    except OSError as error:
        raise UserError(f"run.dir={folder}: can't be written ({error.strerror}).") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return bool(index.checkpoints())


def keep_restored(folder: Path) -> None:
    """The run has begun with what was restored."""
    (folder / _MARK).unlink(missing_ok=True)


def discard_restored(folder: Path) -> None:
    """Take away what was restored, where the run is refused: it is another one's."""
    if (folder / _MARK).exists():
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        for name in (*DOCUMENTS, ID, _MARK):
            if name != "log.txt":
                (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # there is more in it, or no such folder
            (folder / OF_TRACKERS[0]).parent.rmdir()


def local_copy(url: str, key: str, checkpoints: bool = True) -> Path:
    """A folder of this machine's cache, as the mirrored run is now. key: of the word that names it.
    checkpoints: are needed. What is damaged there is left out.

    Raises UserError where there is no run, the store can't be read, or has no whole checkpoint any more.
    """
    store = opened(url, key, _RETRY_S)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ddptrain" / "mirrors"
    home = cache / hashlib.sha256(store.url.encode()).hexdigest()[:16]
    folder = home / (Path(store.url).name.strip(".") or "run")  # a report names the run so
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(home / ".lock"):
            index = read_index(store)
            if index is None:
                raise UserError(f"{key}={store.shown}: holds no mirrored run.")
            index, problems = _fetched(store, index, lambda index: _copy(store, index, folder, checkpoints))
            _skip(index, problems)
    except OSError as error:
        raise UserError(f"{folder}: can't be written ({error.strerror}).") from error
    return folder


def _check_apart(store: Store, folder: Path) -> None:
    """Raises UserError for a mirror in the run's folder, or around it."""
    if store.folder is not None:
        here, there = folder.resolve(), store.folder.resolve()
        if here.is_relative_to(there) or there.is_relative_to(here):
            raise UserError(f"run.mirror={store.shown}: must be a folder apart from run.dir={folder}.")


def _fetched(
    store: Store, index: Index, fetch: Callable[[Index], dict[str, UnusableObject]]
) -> tuple[Index, dict[str, UnusableObject]]:
    """What an index names, or a newer one where that can't be used: the first one's objects may be gone by
    now. Returns that index, and what of it can't be used."""
    problems = fetch(index)
    while problems and (newest := read_index(store)) not in (index, None):
        assert newest is not None
        index, problems = newest, fetch(newest)
    return index, problems


def _bring_run(store: Store, index: Index, part: Path) -> dict[str, UnusableObject]:
    """All that the index names, into a new folder. Returns what `_bring` does."""
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    return _bring(store, index, part)


def _skip(index: Index, problems: Mapping[str, UnusableObject]) -> None:
    """Tell what is left out. Raises UserError where that is every checkpoint."""
    names = [f"checkpoints/{name}" for name in index.checkpoints()]
    if names and set(names) <= problems.keys():
        raise problems[names[0]]
    for problem in problems.values():
        log.warning("skipping what is damaged: %s", problem)


def _pieces(index: Index) -> dict[str, list[str]]:
    """The paths of each document and of each checkpoint."""
    pieces: dict[str, list[str]] = {}
    for path in index.files:
        name = path if path in DOCUMENTS else "/".join(path.split("/")[:2])
        pieces.setdefault(name, []).append(path)
    return pieces


def _move(store: Store, index: Index, problems: dict[str, UnusableObject], part: Path, folder: Path) -> None:
    """To where the run looks for it, the checkpoints last."""
    try:
        _skip(index, problems)
    except UnusableObject as problem:
        raise UserError(f"{problem} Start anew at another address: run.mirror=...") from problem
    (folder / ID).write_text(f"{index.run}\n{index.sender}")
    if not index.checkpoints():
        return
    log.info("restoring  from %s", store.shown)
    (folder / _MARK).touch()
    for name in DOCUMENTS:
        if (part / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            (part / name).replace(folder / name)
    (part / "checkpoints").rename(folder / "checkpoints")


def _copy(store: Store, index: Index, folder: Path, checkpoints: bool) -> dict[str, UnusableObject]:
    """Make a folder what the index names. Returns what `_bring` does."""
    known = folder / ID
    if not known.is_file() or known.read_text() != index.run:
        for of_another_run in ("checkpoints", "trackers"):
            shutil.rmtree(folder / of_another_run, ignore_errors=True)
        known.write_text(index.run)
    for name in DOCUMENTS:
        if name not in index.files and name not in OF_TRACKERS:  # a report to a tracker has written those
            (folder / name).unlink(missing_ok=True)
    problems = _bring(store, index, folder, checkpoints)
    if checkpoints:
        _drop_others(folder, index)
    return problems


def _bring(store: Store, index: Index, folder: Path, checkpoints: bool = True) -> dict[str, UnusableObject]:
    """Documents of an index, and maybe its checkpoints, into a folder, but for files that are there. Returns
    what can't be used, by document or checkpoint: no file of it is there then. Raises UserError where the
    store can't be read."""
    problems = {}
    for name, paths in _pieces(index).items():
        if name not in DOCUMENTS and not checkpoints:
            continue
        try:
            for path in paths:
                entry, target = index.files[path], folder / path
                if not _is(target, entry):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    _download(store, path, entry, target)
        except UnusableObject as error:
            problems[name] = error
            if name in DOCUMENTS:
                (folder / name).unlink(missing_ok=True)
            else:
                shutil.rmtree(folder / name, ignore_errors=True)
    return problems


def _download(store: Store, path: str, entry: Entry, target: Path) -> None:
    aside = target.with_name(f".{target.name}.part")
    with aside.open("w+b") as file:

        def check() -> None:
            file.seek(0)
            check_content(hashlib.file_digest(file, "sha256").hexdigest(), file.tell(), entry)

        store.download(object_key(path, entry), file, check)
    aside.replace(target)


def _is(file: Path, entry: Entry) -> bool:
    with suppress(OSError), file.open("rb") as opened_file:
        digest = hashlib.file_digest(opened_file, "sha256").hexdigest()
        return Entry(digest, opened_file.tell()) == entry
    return False


def _drop_others(folder: Path, index: Index) -> None:
    """Checkpoints that the mirror does not hold any more."""
    kept = {path.split("/")[1] for path in index.files if "/" in path}
    there = folder / "checkpoints"
    for path in there.iterdir() if there.is_dir() else ():
        if path.name not in kept:
            shutil.rmtree(path)
