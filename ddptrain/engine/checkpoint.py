"""Checkpoints that are whole or absent, with a hash that is checked before anything is used.

``checkpoints/step-<n>/`` holds ``state.pt`` and ``manifest.json``. A folder is written aside, flushed
to the disk and renamed, so a kill at any moment leaves the old ones or the new one, never a half.
The newest valid folder counts; there is no pointer that could go stale.
"""

import hashlib
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddptrain.errors import UserError

log = logging.getLogger(__name__)

STATE, MANIFEST = "state.pt", "manifest.json"
FORMAT = 2
_STEP = re.compile(r"step-(\d+)")
_ASIDE = ".damaged"


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that has been read and verified."""

    path: Path
    payload: bytes
    manifest: Mapping[str, Any]


class DamagedError(UserError):
    """A checkpoint is not what was written: another one can take its place."""


class Checkpointer:
    """The checkpoints of one run. Only rank 0 uses one; the others are sent what it reads."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, state: Mapping[str, Any], facts: Mapping[str, Any]) -> Path:
        """Write ``step-<n>`` and drop the oldest beyond ``keep``. Returns its folder.

        Raises UserError, with the path and the bytes needed, where the disk refuses.
        """
        path = self._folder / f"step-{facts['step']}"
        self._write(path, state, facts)
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return path

    def save_best(self, state: Mapping[str, Any], facts: Mapping[str, Any]) -> Path:
        """Write ``best`` in place of the one before."""
        path = self._folder / "best"
        self._write(path, state, facts)
        return path

    def steps(self) -> list[Path]:
        """The step folders, oldest first."""
        if not self._folder.is_dir():
            return []
        found = [(int(m[1]), path) for path in self._folder.iterdir() if (m := _STEP.fullmatch(path.name))]
        return [path for _, path in sorted(found)]

    def recover(self) -> None:
        """Clear up what a kill in the middle of a save has left."""
        for old in self._folder.glob(".*.old"):
            path = self._folder / old.name.removeprefix(".").removesuffix(".old")
            if not path.exists():
                old.rename(path)
        for aside in self._folder.glob(".*"):
            if not aside.name.endswith(_ASIDE):
                shutil.rmtree(aside, ignore_errors=True)

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints of later steps, which are damaged: the run goes on from ``step`` and will
        write them anew."""
        for path in self.steps():
            if int(path.name.removeprefix("step-")) > step:
                path.rename(path.with_name(f".{path.name}.{os.getpid()}{_ASIDE}"))

    def newest(self) -> Saved | None:
        """The newest valid checkpoint; damaged ones are passed over with a warning.

        Raises UserError where there are some and all are damaged: starting anew would lose the run.
        """
        damaged = []
        for path in reversed(self.steps()):
            try:
                return read(path)
            except DamagedError as error:
                log.warning("passing over a damaged checkpoint: %s", error)
                damaged.append(str(error))
        if damaged:
            raise UserError(
                f"{self._folder}: none of its {len(damaged)} checkpoints can be used. {damaged[0]}"
                " Name another one (run.resume=<folder>), or start anew (run.resume=never)."
            )
        return None

    def _write(self, path: Path, state: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        payload = buffer.getbuffer()
        manifest = {
            "format": FORMAT,
            **facts,
            "files": {STATE: {"sha256": hashlib.sha256(payload).hexdigest(), "bytes": len(payload)}},
        }
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            _flushed(aside / STATE, payload)
            _flushed(aside / MANIFEST, json.dumps(manifest, indent=2).encode())
            _flush_folder(aside)
            _replace(aside, path)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            free = shutil.disk_usage(self._folder.parent).free
            raise UserError(
                f"{path}: can't be saved ({error.strerror}): {len(payload):,} bytes needed, {free:,} free."
                " Older checkpoints are untouched. Make room or allow writing, then start the same"
                " command again with run.dir=... to go on.",
                everywhere=False,
            ) from error


def read(path: Path) -> Saved:
    """Read and verify one checkpoint folder.

    Raises UserError where it is missing, damaged or not a checkpoint of ddptrain.
    """
    if not path.is_dir():
        kind = "is a file, but" if path.exists() else "does not exist;"
        raise UserError(f"{path}: {kind} a checkpoint is a folder that holds {STATE} and {MANIFEST}.")
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        entry = manifest["files"][STATE]
        payload = (path / STATE).read_bytes()
    except FileNotFoundError as error:
        raise DamagedError(
            f"{path}: is not a checkpoint of ddptrain: {Path(error.filename).name} is missing."
        ) from error
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(
            f"{path}: its {MANIFEST} can't be read ({error}); the checkpoint is damaged."
        ) from error
    if hashlib.sha256(payload).hexdigest() != entry["sha256"]:
        raise DamagedError(
            f"{path}: {STATE} does not match its SHA-256 ({len(payload):,} bytes, {entry['bytes']:,}"
            " expected); the checkpoint is damaged."
        )
    if manifest.get("format") != FORMAT:
        raise UserError(f"{path}: has format {manifest.get('format')}; this ddptrain reads {FORMAT}.")
    return Saved(path, payload, manifest)


def unpack(payload: bytes, where: str) -> dict[str, Any]:
    """The state in a verified payload, on the CPU: tensors and plain values, nothing is run."""
    try:
        state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever the bytes lead to
        raise UserError(f"{where}: {STATE} is not a state of ddptrain ({type(error).__name__}).") from error
    if not isinstance(state, dict) or not {"model", "optimizer", "step"} <= state.keys():
        raise UserError(f"{where}: {STATE} is not a state of ddptrain: model, optimizer or step is missing.")
    return state


def _flushed(path: Path, payload: bytes | memoryview) -> None:
    with path.open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(aside: Path, path: Path) -> None:
    """Rename a folder over another one. Folders can't be swapped in one step, so the old one is
    renamed first; whoever looks in between finds neither, and `newest` the step before."""
    if path.exists():
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        aside.rename(path)
        _flush_folder(path.parent)
        shutil.rmtree(old)
    else:
        aside.rename(path)
        _flush_folder(path.parent)
