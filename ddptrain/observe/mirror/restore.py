"""A run's folder from its mirror."""

import hashlib
import logging
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ddptrain.data.disk import exclusive_lock
from ddptrain.data.stream.store import Store
from ddptrain.errors import UserError
from ddptrain.observe.mirror.layout import (
    DOCUMENTS,
    ID,
    Entry,
    Index,
    check_content,
    object_key,
    opened,
    read_index,
)

log = logging.getLogger("ddptrain")

_RETRY_S = 60.0


def restore(url: str, folder: Path) -> bool:
    """Bring a run that goes on to a folder without checkpoints. Returns False where the mirror is empty.

    A checkpoint that is damaged there is left out, if there is another one. Raises UserError where the store
    can't be read, or has no whole checkpoint.
    """
    store = opened(url, "run.mirror", _RETRY_S)
    index = read_index(store)
    if index is None:
        return False
    (folder / ID).write_text(index.run)
    if not index.checkpoints():
        return False
    log.info("restoring  from %s", store.shown)
    new = folder / "checkpoints.part"
    shutil.rmtree(new, ignore_errors=True)
    try:
        _bring(store, index, [name for name in DOCUMENTS if name in index.files], folder)
        problems = [_try(store, index, name, new) for name in index.checkpoints()]
        if all(problems):
            raise UserError(f"{problems[0]} No checkpoint there can be used. Start anew: run.resume=never.")
        for name in ("best", "best-before"):
            _try(store, index, name, new)
        new.rename(folder / "checkpoints")
    except OSError as error:
        raise UserError(f"run.dir={folder}: can't be written ({error.strerror}).") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return True


def local_copy(url: str, key: str, checkpoints: bool = True) -> Path:
    """A folder of this machine's cache, as the mirrored run is now. key: of the word that names it.

    Raises UserError where there is no run, or it can't be read whole.
    """
    store = opened(url, key, _RETRY_S)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ddptrain" / "mirrors"
    folder = cache / hashlib.sha256(store.url.encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(folder / ".lock"):
            index = read_index(store)
            if index is None:
                raise UserError(f"{key}={store.shown}: holds no mirrored run.")
            while (problem := _copy(store, index, folder, checkpoints)) is not None:
                newest = read_index(store)
                if newest is None or newest == index:
                    raise problem
                index = newest  # what the other one named may be gone by now
    except OSError as error:
        raise UserError(f"{folder}: can't be written ({error.strerror}).") from error
    return folder


def _copy(store: Store, index: Index, folder: Path, checkpoints: bool) -> UserError | None:
    """Make a folder what the index names. Returns what went wrong."""
    wanted = [path for path in index.files if checkpoints or path in DOCUMENTS]
    try:
        _bring(store, index, wanted, folder)
    except UserError as error:
        return error
    if checkpoints:
        _drop_others(folder, index)
    return None


def _try(store: Store, index: Index, name: str, checkpoints: Path) -> str:
    """Bring a checkpoint; returns what went wrong with it."""
    paths = [path for path in index.files if path.startswith(f"checkpoints/{name}/")]
    aside = checkpoints / "aside"
    try:
        _bring(store, index, paths, aside)
    except UserError as error:
        shutil.rmtree(aside, ignore_errors=True)
        log.warning("skipping a damaged checkpoint: %s", error)
        return str(error)
    if paths:
        (aside / "checkpoints" / name).rename(checkpoints / name)
        shutil.rmtree(aside)
    return ""


def _bring(store: Store, index: Index, paths: Iterable[str], folder: Path) -> None:
    """Files of an index into a folder, but for those that are there. Raises UserError."""
    for path in paths:
        entry, target = index.files[path], folder / path
        if not _is(target, entry):
            target.parent.mkdir(parents=True, exist_ok=True)
            _download(store, path, entry, target)


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
