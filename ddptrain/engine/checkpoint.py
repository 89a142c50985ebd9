"""Checkpoints, written atomically and verified by hash before use.

``checkpoints/step-<n>/`` holds ``state.pt`` and ``manifest.json``, which has the SHA-256 of the state and of
itself. A folder is written under a temporary name, flushed to the disk and renamed: a kill at any moment
leaves a complete checkpoint or none. A resume uses the newest valid folder.
"""

import hashlib
import io
import json
import logging
import os
import re
import shutil
import zipfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddptrain.data.disk import flush_folder
from ddptrain.errors import UserError
from ddptrain.text import parse_json

log = logging.getLogger(__name__)

STATE, MANIFEST = "state.pt", "manifest.json"
FORMAT = 3
_UNSEALED_FORMATS = (1, 2)
_SEAL = "sha256"
_STEP = re.compile(r"step-(\d+)")
_ASIDE = ".damaged"


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint that has been read and verified."""

    path: Path
    payload: bytes
    manifest: Mapping[str, Any]


class DamagedError(UserError):
    """A checkpoint is damaged; an older one may be usable."""


class Checkpointer:
    """The checkpoints of one run. Only rank 0 reads and writes; it sends the others what it has read.

    background: a save returns once the state is copied, and a thread hashes and writes it. At most one write
    is in flight. Its error is raised by the next save, or by `finish`.
    """

    def __init__(self, folder: Path, keep: int, background: bool = False) -> None:
        self._folder = folder
        self._keep = keep
        self._writer = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._in_flight: Future[None] | None = None

    def save(self, state: Mapping[str, Any], facts: Mapping[str, Any]) -> Path:
        """Write ``step-<n>`` and drop the oldest beyond ``keep``. Returns its folder.

        Raises UserError, with the path and the bytes needed, where the disk refuses.
        """
        return self._save(self._folder / f"step-{facts['step']}", state, facts)

    def save_best(self, state: Mapping[str, Any], facts: Mapping[str, Any]) -> Path:
        """Write ``best``, replacing the previous one. Returns its folder; raises as `save` does."""
        return self._save(self._folder / "best", state, facts)

    def finish(self) -> None:
        """Wait for the write in flight, if there is one. Raises its UserError."""
        if self._in_flight is not None:
            wait([self._in_flight])  # Ctrl-C may end this; the write is then still known to be in flight
            written, self._in_flight = self._in_flight, None
            written.result()

    def steps(self) -> list[Path]:
        """The step folders, oldest first."""
        if not self._folder.is_dir():
            return []
        found = [(int(m[1]), path) for path in self._folder.iterdir() if (m := _STEP.fullmatch(path.name))]
        return [path for _, path in sorted(found)]

    def recover(self) -> None:
        """Remove what a kill during a save has left behind."""
        for old in self._folder.glob(".*.old"):
            path = self._folder / old.name.removeprefix(".").removesuffix(".old")
            if not path.exists():
                old.rename(path)
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
        """The newest valid checkpoint; damaged ones are skipped with a warning.

        Raises UserError if all are damaged: starting again would lose the run.
        """
        damaged = []
        for path in reversed(self.steps()):
            try:
                return read(path)
            except DamagedError as error:
                log.warning("skipping a damaged checkpoint: %s", error)
                damaged.append(str(error))
        if damaged:
            raise UserError(
                f"{self._folder}: none of its {len(damaged)} checkpoints can be used. {damaged[0]}"
                " Name another one (run.resume=<folder>), or start anew (run.resume=never)."
            )
        return None

    def _save(self, path: Path, state: Mapping[str, Any], facts: Mapping[str, Any]) -> Path:
        self.finish()
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)  # all that has to happen before the next step changes the tensors
        if self._writer is None:
            self._write(path, buffer.getvalue(), facts)
        else:
            self._in_flight = self._writer.submit(self._write, path, buffer.getvalue(), dict(facts))
        return path

    def _write(self, path: Path, payload: bytes, facts: Mapping[str, Any]) -> None:
        entry = {"sha256": hashlib.sha256(payload).hexdigest(), "bytes": len(payload)}
        manifest = sealed({"format": FORMAT, **facts, "files": {STATE: entry}})
        aside = _aside(path)
        try:
            shutil.rmtree(aside, ignore_errors=True)
            if not self._folder.is_dir():
                self._folder.mkdir(parents=True)
                flush_folder(self._folder.parent)
            aside.mkdir()
            _flushed(aside / STATE, payload)
            _flushed(aside / MANIFEST, manifest)
            flush_folder(aside)
            _replace(aside, path)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise UserError(
                f"{path}: can't be saved ({error.strerror}): {len(payload):,} bytes needed,"
                f" {_free(path):,} free. Older checkpoints are untouched. Make room or allow writing, then"
                " start the same command again with run.dir=... to go on.",
                everywhere=False,
            ) from error
        for old in self.steps()[: -self._keep]:
            _remove(old)


def sealed(content: Mapping[str, Any]) -> bytes:
    """A manifest as it is written: JSON whose last entry is the SHA-256 of all before it."""
    digest = hashlib.sha256(json.dumps(content, indent=2).encode()).hexdigest()
    return json.dumps({**content, _SEAL: digest}, indent=2).encode()


def read(path: Path) -> LoadedCheckpoint:
    """Read and verify one checkpoint folder.

    Raises UserError where it is missing or not one that this ddptrain reads, DamagedError where it is not
    what was written.
    """
    if not path.is_dir():
        kind = "is a file, but" if path.exists() else "does not exist;"
        raise UserError(f"{path}: {kind} a checkpoint is a folder that holds {STATE} and {MANIFEST}.")
    try:
        manifest = _unsealed(path, (path / MANIFEST).read_bytes())
        payload = (path / STATE).read_bytes()
    except FileNotFoundError as error:
        raise DamagedError(
            f"{path}: is not a checkpoint of ddptrain: {Path(error.filename).name} is missing."
        ) from error
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror}).") from error
    match manifest.get("files"):
        case {"state.pt": {"sha256": str(digest), "bytes": int(size), **more}, **others} if not more | others:
            pass
        case _:
            raise DamagedError(
                f"{path}: its {MANIFEST} has to give sha256 and bytes of {STATE} and of nothing else."
            )
    if len(payload) != size:
        raise DamagedError(
            f"{path}: {STATE} has {len(payload):,} bytes, but {size:,} were written; it is damaged."
        )
    if hashlib.sha256(payload).hexdigest() != digest:
        raise DamagedError(f"{path}: {STATE} does not match its SHA-256; the checkpoint is damaged.")
    _check_step(path, manifest.get("step"), MANIFEST)
    return LoadedCheckpoint(path, payload, manifest)


def _unsealed(path: Path, written: bytes) -> dict[str, Any]:
    """The manifest in these bytes, which must equal what `sealed` writes: JSON has several spellings of a
    value (1e-05, 1E-05), and a flipped bit may turn one into another."""
    try:
        manifest = parse_json(written)
    except ValueError as error:
        raise DamagedError(
            f"{path}: its {MANIFEST} can't be read ({error}); the checkpoint is damaged."
        ) from error
    if not isinstance(manifest, dict):
        raise DamagedError(f"{path}: its {MANIFEST} is no JSON object; the checkpoint is damaged.")
    is_earlier = manifest.get("format") in _UNSEALED_FORMATS and _SEAL not in manifest
    content = {name: value for name, value in manifest.items() if name != _SEAL}
    if not is_earlier and written != sealed(content):
        raise DamagedError(f"{path}: {MANIFEST} does not match its own SHA-256; the checkpoint is damaged.")
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"{path}: has format {manifest.get('format')}, and this ddptrain reads {FORMAT}. Use the ddptrain"
            " it was made with, or start a new run."
        )
    return content


def unpack(payload: bytes, where: str) -> dict[str, Any]:
    """The state in a verified payload, on the CPU: tensors and plain values; no code is executed."""
    try:
        _check_sizes(payload)
        state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever the bytes lead to
        raise UserError(f"{where}: {STATE} is not a state of ddptrain ({type(error).__name__}).") from error
    if not isinstance(state, dict) or not {"model", "optimizer", "step"} <= state.keys():
        raise UserError(f"{where}: {STATE} is not a state of ddptrain: model, optimizer or step is missing.")
    if not isinstance(state["step"], int):
        raise UserError(f"{where}: {STATE} is not a state of ddptrain: its step is no number.")
    _check_step(Path(where), state["step"], STATE)
    return state


def _check_sizes(payload: bytes) -> None:
    """Refuse archives that expand when read: torch.save never compresses."""
    with zipfile.ZipFile(io.BytesIO(payload)) as archive:
        records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError("compressed records")
    if sum(record.file_size for record in records) > len(payload):
        raise ValueError("records that overlap")


def _check_step(path: Path, step: object, file: str) -> None:
    """Refuse a file of another step's checkpoint (files that were swapped are valid by themselves)."""
    named = _STEP.fullmatch(path.name)
    if named is not None and step != int(named[1]):
        raise DamagedError(f"{path}: its {file} is of step {step}; the checkpoint is damaged.")


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


def _replace(aside: Path, path: Path) -> None:
    """Rename a folder over another one. That takes two steps, so the old one is renamed first; in between
    `newest` finds the previous step."""
    old = path.with_name(f".{path.name}.old")
    if replaces := path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    try:
        aside.rename(path)
    except OSError:
        if replaces:
            old.rename(path)
        raise
    flush_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _remove(path: Path) -> None:
    """Delete a checkpoint. A kill in between leaves nothing that looks like one."""
    aside = _aside(path)
    with suppress(OSError):
        path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
