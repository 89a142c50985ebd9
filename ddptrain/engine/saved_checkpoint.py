"""Reading checkpoints, each file verified by its hash before it is used."""

import hashlib
import io
import json
import logging
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddptrain.engine.shards import FOLDER, OF_A_RANK, Empty, entry_of, with_shards
from ddptrain.errors import UserError
from ddptrain.text import parse_json

log = logging.getLogger("ddptrain")

STATE, MANIFEST = "state.pt", "manifest.json"
FORMAT = 7
STEP = re.compile(r"step-(\d+)")
_SEAL = "sha256"
_SHARD = re.compile(rf"{FOLDER}/(\.metadata|{OF_A_RANK})")


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint that has been read and verified."""

    path: Path
    payload: bytes | bytearray
    """Of its state.pt."""
    manifest: Mapping[str, Any]


class DamagedError(UserError):
    """A checkpoint is damaged; an older one may be usable."""


def sealed(content: Mapping[str, Any]) -> bytes:
    """A manifest as it is written: JSON whose last entry is the SHA-256 of all before it."""
    digest = hashlib.sha256(json.dumps(content, indent=2).encode()).hexdigest()
    return json.dumps({**content, _SEAL: digest}, indent=2).encode()


def read(path: Path, key: str = "") -> LoadedCheckpoint:
    """Read and verify one checkpoint folder. key: what names it, like ``run.resume=``.

    Raises UserError where it is missing or not one that this ddptrain reads, DamagedError where it is not
    what was written.
    """
    if not path.is_dir():
        kind = "is a file, but" if path.exists() else "does not exist;"
        raise UserError(f"{key}{path}: {kind} a checkpoint is a folder that holds {STATE} and {MANIFEST}.")
    try:
        manifest = _unsealed(path, (path / MANIFEST).read_bytes())
        payload = (path / STATE).read_bytes()
    except FileNotFoundError as error:
        raise DamagedError(
            f"{path}: is not a checkpoint of ddptrain: {Path(error.filename).name} is missing."
        ) from error
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror}).") from error
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(name == STATE or _SHARD.fullmatch(name) for name in files):
        raise DamagedError(
            f"{path}: its {MANIFEST} has to name {STATE}, files of {FOLDER}/ and nothing else."
        )
    own = {"sha256": hashlib.sha256(payload).hexdigest(), "bytes": len(payload)}
    for name in {STATE: None, **files}:
        try:
            entry = own if name == STATE else entry_of(path / name)
        except FileNotFoundError as error:
            raise DamagedError(f"{path}: {name} is missing; the checkpoint is damaged.") from error
        except OSError as error:
            raise UserError(f"{path}: {name} can't be read ({error.strerror}).") from error
        _check_file(f"{path}: {name}", entry, files.get(name))
    _check_step(path, manifest.get("step"), MANIFEST)
    return LoadedCheckpoint(path, payload, manifest)


def steps_in(folder: Path) -> list[Path]:
    """The checkpoints of steps in a run's folder of checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    numbered = [(int(m[1]), path) for path in folder.iterdir() if (m := STEP.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def newest_in(folder: Path) -> LoadedCheckpoint | None:
    """The newest valid one of `steps_in`; damaged ones are skipped with a warning.

    Raises UserError if all are damaged: starting again would lose the run.
    """
    damaged = []
    for path in reversed(steps_in(folder)):
        try:
            return read(path)
        except DamagedError as error:
            log.warning("skipping a damaged checkpoint: %s", error)
            damaged.append(str(error))
    if damaged:
        raise UserError(
            f"{folder}: none of its {len(damaged)} checkpoints can be used. {damaged[0]}"
            " Name another one and a new folder (run.resume=<checkpoint> run.dir=<new>), or start anew"
            " (run.resume=never)."
        )
    return None


def _check_file(where: str, entry: Mapping[str, Any], written: object) -> None:
    """Raise DamagedError where a file is not what the manifest says."""
    match written:
        case {"sha256": str(digest), "bytes": int(size), **more} if not more:
            pass
        case _:
            raise DamagedError(f"{where}: the {MANIFEST} has to give its sha256 and bytes.")
    if entry["bytes"] != size:
        raise DamagedError(f"{where} has {entry['bytes']:,} bytes, but {size:,} were written; it is damaged.")
    if entry["sha256"] != digest:
        raise DamagedError(f"{where} does not match its SHA-256; the checkpoint is damaged.")


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
    content = {name: value for name, value in manifest.items() if name != _SEAL}
    if written != sealed(content):
        raise DamagedError(f"{path}: {MANIFEST} does not match its own SHA-256; the checkpoint is damaged.")
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"{path}: has format {manifest.get('format')}, and this ddptrain reads {FORMAT}. Use the ddptrain"
            " it was made with, or start a new run."
        )
    return content


def unpack(saved: LoadedCheckpoint, empty: Empty | None = None) -> dict[str, Any]:
    """The state in a verified checkpoint, on the CPU: tensors and plain values; no code is executed.

    empty: makes the tensors that ``shards/`` is read into, of a shape and a dtype; None: complete ones.
    """
    where = str(saved.path)
    try:
        _check_sizes(saved.payload)
        state = torch.load(io.BytesIO(saved.payload), map_location="cpu", weights_only=True)
        if len(saved.manifest["files"]) > 1:
            state = with_shards(state, saved.path / FOLDER, empty or _whole)
    except torch.OutOfMemoryError:
        raise
    except OSError as error:
        raise UserError(
            f"{where}: can't be read ({error}). Each rank reads its part: all nodes need the run's folder on"
            " a disk that they share."
        ) from error
    except Exception as error:  # torch raises whatever the bytes lead to
        raise UserError(f"{where}: {STATE} is not a state of ddptrain ({type(error).__name__}).") from error
    if not isinstance(state, dict) or not {"model", "optimizer", "step"} <= state.keys():
        raise UserError(f"{where}: {STATE} is not a state of ddptrain: model, optimizer or step is missing.")
    if not isinstance(state["step"], int):
        raise UserError(f"{where}: {STATE} is not a state of ddptrain: its step is no number.")
    _check_step(Path(where), state["step"], STATE)
    return state


def _whole(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _check_sizes(payload: bytes | bytearray) -> None:
    """Refuse archives that expand when read: torch.save never compresses."""
    with zipfile.ZipFile(io.BytesIO(payload)) as archive:
        records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError("compressed records")
    if sum(record.file_size for record in records) > len(payload):
        raise ValueError("records that overlap")


def _check_step(path: Path, step: object, file: str) -> None:
    """Refuse a file of another step's checkpoint (files that were swapped are valid by themselves)."""
    named = STEP.fullmatch(path.name)
    if named is not None and step != int(named[1]):
        raise DamagedError(f"{path}: its {file} is of step {step}; the checkpoint is damaged.")
