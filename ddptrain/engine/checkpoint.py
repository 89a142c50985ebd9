"""Checkpoints, written atomically and verified by hash before use.

``checkpoints/step-<n>/`` holds ``state.pt``, maybe ``shards/``, and ``manifest.json``, which has the SHA-256
of each file and of itself. A folder is written under a temporary name, flushed to the disk and renamed: a
kill at any moment leaves a complete checkpoint or none. A resume uses the newest valid folder.

Where the run's folder was moved, deleted or replaced meanwhile, the state is kept elsewhere and the run ends.
"""

import hashlib
import io
import logging
import os
import shutil
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddptrain.api.world import World
from ddptrain.data.disk import flush_folder
from ddptrain.distributed.comm import from_all_ranks, gloo_group, on_first_rank
from ddptrain.engine.plain_state import check_plain, with_interned_texts
from ddptrain.engine.saved_checkpoint import (
    FORMAT,
    MANIFEST,
    STATE,
    LoadedCheckpoint,
    newest_in,
    sealed,
    steps_in,
)
from ddptrain.engine.shards import FOLDER, Shards, new_folder, without_crc32, without_parts, write_parts
from ddptrain.errors import UserError
from ddptrain.observe.gauges import free_memory
from ddptrain.observe.lock import Lost, lost
from ddptrain.text import finite, json_object

log = logging.getLogger(__name__)

_NICE = 10
_ASIDE = ".damaged"
_BEST, _BEST_BEFORE = "best", "best-before"
"""The second is the best as the newest step's checkpoint knows it, if there is a better one since: a run that
is killed then goes on with it."""


class Checkpointer:
    """The checkpoints of one run, in its folder. Only rank 0 reads and writes, but for `write_shards`; it
    sends the others what it has read.

    background: a save returns once the state is copied, and a thread hashes and writes it; where less memory
    is free than the copy takes, the save writes it itself. At most one write is in flight, on each rank. Its
    error is raised by the next save, or by `finish`.
    """

    def __init__(self, folder: Path, keep: int, background: bool = False) -> None:
        self._folder = folder
        self._keep = keep
        self._writer = ThreadPoolExecutor(1, "checkpoint", _let_others_first) if background else None
        self._in_flight: Future[Any] | None = None
        self._copies: dict[str, Any] = {}
        """Of the last sharded save: to copy into fresh memory takes seven times as long (page faults)."""
        self._group: dist.ProcessGroup | None = None
        """Of the ranks' writers."""
        self._began = False

    def write_shards(self, state: dict[str, Any], world: World) -> tuple[dict[str, Any], Future[Shards]]:
        """Write what each rank has a part of. Returns the rest, and what is written, for `save`.
        Collectives, if there is any."""
        self.finish()
        rest, parts = without_parts(state)
        if not parts:
            return rest, _known(Shards())
        folder = on_first_rank(world, lambda: new_folder(self._place()))
        copies = self._copied(parts, world)
        if copies is None:
            return rest, _known(write_parts(parts, folder, world))
        assert self._writer is not None
        written = self._writer.submit(write_parts, copies, folder, world, self._group)
        self._in_flight = written
        return rest, written

    def _copied(self, parts: Mapping[str, Any], world: World) -> dict[str, Any] | None:
        """In memory, to be written while the training goes on; None where a rank has no room for them.
        Collectives."""
        if self._writer is None:
            return None
        kept = {name: copy for name, copy in self._copies.items() if _is_alike(copy, parts.get(name))}
        own = sum(p.to_local().numel() * p.element_size() for name, p in parts.items() if name not in kept)
        self._copies = {}
        if not all(from_all_ranks(world, free_memory() > world.local_size * own)):
            return None
        if self._group is None:
            self._group = gloo_group()
        for name, part in parts.items():
            if name in kept:
                kept[name].to_local().copy_(part.detach().to_local())
            else:
                # by itself torch's async_save does not copy what is on the CPU already (pytorch#144657)
                kept[name] = part.detach().to("cpu", copy=True)
        self._copies = kept
        return kept

    def save(
        self, state: Mapping[str, Any], facts: Mapping[str, Any], shards: Future[Shards] | None = None
    ) -> Path:
        """Write ``step-<n>`` and drop the oldest beyond ``keep``. Returns its folder.

        Raises UserError, with the path and the bytes needed, where the disk refuses.
        """
        return self._save(self._folder / f"step-{facts['step']}", state, facts, shards)

    def save_best(
        self, state: Mapping[str, Any], facts: Mapping[str, Any], shards: Future[Shards] | None = None
    ) -> Path:
        """Write ``best``, replacing the previous one. Returns its folder; raises as `save` does."""
        return self._save(self._folder / _BEST, state, facts, shards)

    def finish(self) -> None:
        """Wait for the write in flight, if there is one. Raises its UserError."""
        if self._in_flight is not None:
            wait([self._in_flight])  # Ctrl-C may end this; the write is then still known to be in flight
            written, self._in_flight = self._in_flight, None
            written.result()

    def wait(self) -> None:
        """As `finish`, where something else has failed: an error of the write is logged."""
        try:
            self.finish()
        except Exception as error:  # of any kind: what has failed is on its way to the user
            log.warning("the last checkpoint was not written: %s", error)

    @property
    def is_writing(self) -> bool:
        """Whether a write is in flight that has not ended. Any thread may ask."""
        written = self._in_flight
        return written is not None and not written.done()

    @property
    def writes_alone(self) -> bool:
        """The same, of a write that needs no other rank."""
        return self._group is None and self.is_writing

    def steps(self) -> list[Path]:
        """The step folders, oldest first."""
        return steps_in(self._folder)

    def holds(self, step: int) -> bool:
        """Whether there is a checkpoint of this step, damaged or not."""
        return (self._folder / f"step-{step}").is_dir()

    def restore_best(self, best: Mapping[str, float]) -> bool:
        """Let the folder ``best`` be as a resumed state knows it: value by name, and its step; empty where it
        knows none. Returns False where there is no such checkpoint any more."""
        best = finite(best)  # a NaN equals no other
        if _best_in(self._folder / _BEST) == best:
            return True
        before = self._folder / _BEST_BEFORE
        if not best or _best_in(before) != best:
            return False
        _replace(before, self._folder / _BEST)
        return True

    def recover(self) -> None:
        """Remove what a kill during a save has left behind."""
        for old in self._folder.glob(".*.old"):
            path = self._folder / old.name.removeprefix(".").removesuffix(".old")
            if not path.exists():
                old.rename(path)
        best, before = self._folder / _BEST, self._folder / _BEST_BEFORE
        if before.exists() and not best.exists():
            before.rename(best)
        for aside in self._folder.glob(".*"):
            if not aside.name.endswith(_ASIDE):
                shutil.rmtree(aside, ignore_errors=True)

    def set_aside_after(self, step: int) -> None:
        """Rename the (damaged) checkpoints of later steps: the run continues from ``step`` and writes them
        again."""
        for path in self.steps():
            if int(path.name.removeprefix("step-")) > step:
                path.rename(path.with_name(f".{path.name}.{os.getpid()}{_ASIDE}"))

    def newest(self) -> LoadedCheckpoint | None:
        """As `newest_in`."""
        return newest_in(self._folder)

    def _save(
        self, path: Path, state: Mapping[str, Any], facts: Mapping[str, Any], shards: Future[Shards] | None
    ) -> Path:
        if shards is None:
            self.finish()
            shards = _known(Shards())
        check_plain(state, everywhere=False)  # it is rank 0 that writes
        buffer = io.BytesIO()
        # all that has to happen before the next step changes the tensors
        with without_crc32():
            torch.save(with_interned_texts(dict(state)), buffer)
        payload = buffer.getvalue()
        if self._writer is None or free_memory() < len(payload):
            self._write(path, payload, facts, shards)
        else:
            self._in_flight = self._writer.submit(self._write, path, payload, dict(facts), shards)
        return path

    def _may_go_back(self, step: int) -> bool:
        """Whether a resume may begin where the best before this step's counts: not at a step that is saved,
        for there the evaluation comes again."""
        return bool(self.steps()) and not self.holds(step) and not (self._folder / _BEST_BEFORE).exists()

    def _place(self) -> Path:
        """Where checkpoints go: elsewhere, if the run's folder is no longer this run's. On rank 0 only."""
        gone = lost(self._folder.parent)
        if gone is None:
            self._warn_if_deleted()
            return self._folder
        return gone.beside if gone.now is None else gone.now / self._folder.name

    def _warn_if_deleted(self) -> None:
        if self._began and not self._folder.is_dir():
            log.warning("%s was deleted under the run, with the best and earlier ones", self._folder)
        self._began = True

    def _write(self, path: Path, payload: bytes, facts: Mapping[str, Any], written: Future[Shards]) -> None:
        shards = written.result()
        if lost(self._folder.parent) is None:
            self._warn_if_deleted()
            before = self._folder / _BEST_BEFORE
            kept = before if path.name == _BEST and self._may_go_back(facts["step"]) else None
            try:
                _write_new(path, payload, facts, shards, kept)
            except UserError:
                if lost(self._folder.parent) is None:
                    raise
            else:
                for old in [*self.steps()[: -self._keep], *([before] if path.name != _BEST else [])]:
                    _remove(old)
                return
        gone = lost(self._folder.parent)
        assert gone is not None
        kept = self._place() / f"step-{facts['step']}"
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            _write_new(kept, payload, facts, shards)
        except (OSError, UserError) as error:
            raise _ended(self._folder.parent, gone, f"The state could not be kept: {error}") from error
        raise _ended(self._folder.parent, gone, f"The state at step {facts['step']} is kept in {kept}.", kept)


def _let_others_first() -> None:
    """What computes goes before the thread that writes."""
    if sys.platform == "linux":  # where it is a thread's own (nice(2))
        os.nice(_NICE)


def _is_alike(copy: Any, part: Any) -> bool:
    """Whether what is in a DTensor can be copied into another one."""
    return part is not None and all(
        getattr(copy, name) == getattr(part, name) for name in ("shape", "dtype", "placements", "device_mesh")
    )


def _known(shards: Shards) -> Future[Shards]:
    written: Future[Shards] = Future()
    written.set_result(shards)
    return written


def _write_new(
    path: Path, payload: bytes, facts: Mapping[str, Any], shards: Shards, kept: Path | None = None
) -> None:
    """Write a checkpoint's folder, beside others. kept: a name for the one that was there; it is else
    deleted.
    Raises UserError where the disk refuses."""
    entry = {"sha256": hashlib.sha256(payload).hexdigest(), "bytes": len(payload)}
    files = {STATE: entry, **{f"{FOLDER}/{name}": shards.files[name] for name in sorted(shards.files)}}
    manifest = sealed({"format": FORMAT, **facts, "files": files})
    aside = _aside(path)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        if not path.parent.is_dir():
            path.parent.mkdir()  # without its parents: they would be another run's folder than that which was
            flush_folder(path.parent.parent)
        aside.mkdir()
        if shards.files:
            shards.folder.rename(aside / FOLDER)
            flush_folder(aside / FOLDER)
        _flushed(aside / STATE, payload)
        _flushed(aside / MANIFEST, manifest)
        flush_folder(aside)
        _replace(aside, path, kept)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(
            f"{path}: can't be saved ({error.strerror}): {len(payload):,} bytes needed,"
            f" {_free(path):,} free. Older checkpoints are untouched. Make room or allow writing, then"
            " start the same command again with run.dir=... to go on.",
            everywhere=False,
        ) from error


def _ended(folder: Path, gone: Lost, what: str, kept: Path | None = None) -> UserError:
    """The end of a run that has lost its folder. kept: the checkpoint that was written instead."""
    if gone.now is not None:
        again = f" Go on there: run.dir={gone.now}"
    else:
        again = f" Go on from it in another folder: run.dir=... run.resume={kept}" * (kept is not None)
    return UserError(
        f"run.dir={folder}: {gone.why}, under the run that was going on in it, which has ended."
        f" {what}{again}",
        everywhere=False,
    )


def _best_in(folder: Path) -> Mapping[str, float]:
    """What a checkpoint's manifest says the best is, by `finite`; empty where there is none."""
    best: Mapping[str, float] = finite(json_object(folder / MANIFEST).get("best", {}))
    return best


def _aside(path: Path) -> Path:
    """The name of a folder while it is written or deleted, which is not a checkpoint's."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def _free(path: Path) -> int:
    """Free bytes on the file system of a folder."""
    there = next(parent for parent in path.absolute().parents if os.path.exists(parent))
    return shutil.disk_usage(there).free


def _flushed(path: Path, payload: bytes) -> None:
    with path.open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def _replace(aside: Path, path: Path, kept: Path | None = None) -> None:
    """Rename a folder over another one. That takes two steps, so the old one is renamed first; in between
    `newest` finds the previous step. kept: as `_write_new` has it."""
    old = kept or path.with_name(f".{path.name}.old")
    if replaces := path.exists():
        shutil.rmtree(old, ignore_errors=True)
        if old.exists():  # over NFS, where another process still reads a file of it; `recover` deletes it
            old.rename(old.with_name(f".{old.name}.{time.time_ns()}"))
        path.rename(old)
    try:
        aside.rename(path)
    except OSError:
        if replaces:
            old.rename(path)
        raise
    flush_folder(path.parent)
    if kept is None:
        shutil.rmtree(old, ignore_errors=True)


def _remove(path: Path) -> None:
    """Delete a checkpoint. A kill in between leaves nothing that looks like one."""
    aside = _aside(path)
    with suppress(OSError):
        path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
