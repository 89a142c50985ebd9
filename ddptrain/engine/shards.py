"""Checkpoints of which each rank writes its part, by torch.distributed.checkpoint.

The tensors stand in ``shards/`` beside ``state.pt``, where their names take their places.
"""

import hashlib
import pickle
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddptrain.api.world import World
from ddptrain.distributed.comm import from_all_ranks, on_all_ranks, on_first_rank
from ddptrain.distributed.foreach import mapped
from ddptrain.errors import UserError

FOLDER = "shards"
Empty = Callable[[torch.Size, torch.dtype], Tensor]
Files = dict[str, dict[str, Any]]
"""SHA-256 and bytes, by name."""

_PLACE = "\0shard "
"""What begins the name that stands for a tensor: no value of a state does."""
_MAY_LOAD = {
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"},
    "pathlib": {"PosixPath"},
}  # fmt: skip
"""All that torch's ``.metadata``, a pickle, needs."""


def write_shards(state: dict[str, Any], folder: Path, world: World) -> tuple[dict[str, Any], Files]:
    """Write the tensors of which each rank has a part into a new folder, which all ranks see. Returns the
    state without them, and the files. Collectives, if there are any; else nothing happens.

    Raises UserError, on all ranks, where the disk refuses.
    """
    parts: dict[str, Any] = {}

    def taken(value: Any) -> Any:
        if not hasattr(value, "full_tensor"):  # a DTensor; its module is slow to import
            return value
        parts[str(len(parts))] = value
        return f"{_PLACE}{len(parts) - 1}"

    rest: dict[str, Any] = mapped(state, taken)
    if not parts:
        return state, {}
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    def emptied() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        _tried(folder, lambda: folder.mkdir(parents=True))

    on_first_rank(world, emptied)
    try:
        save(parts, storage_writer=FileSystemWriter(folder))
    except CheckpointException as error:
        raise _refused(folder, next(iter(error.failures.values()))[0]) from error
    mine = [*folder.glob(f"__{world.rank}_*"), *(folder.glob(".metadata") if world.is_first else ())]
    entries = on_all_ranks(
        world, lambda: _tried(folder, lambda: {path.name: entry_of(path) for path in mine})
    )
    return rest, {name: entry for rank in from_all_ranks(world, entries) for name, entry in rank.items()}


def with_shards(state: dict[str, Any], folder: Path, empty: Empty) -> dict[str, Any]:
    """The state with the tensors of a verified folder in their places. empty: makes what is read into."""
    places: dict[str, Tensor] = {}
    found = _Found(folder, empty, places)
    whole: dict[str, Any] = mapped(state, found)
    if places:
        found.read()
    return whole


class _Found:
    """Replaces a name by the tensor to read."""

    def __init__(self, folder: Path, empty: Empty, places: dict[str, Tensor]) -> None:
        self._folder = folder
        self._empty = empty
        self._places = places
        self._known: Mapping[str, Any] | None = None

    def __call__(self, value: Any) -> Any:
        if not (isinstance(value, str) and value.startswith(_PLACE)):
            return value
        if self._known is None:
            self._known = _metadata(self._folder).state_dict_metadata
        name = value.removeprefix(_PLACE)
        about = self._known[name]
        self._places[name] = self._empty(about.size, about.properties.dtype)
        return self._places[name]

    def read(self) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        class Reader(FileSystemReader):
            def read_metadata(self, *_: Any, **__: Any) -> Any:
                return _metadata(folder)

        folder = self._folder
        with warnings.catch_warnings():  # that it reads alone, as it is asked to
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(dict(self._places), storage_reader=Reader(folder), no_dist=True)


def entry_of(path: Path) -> dict[str, Any]:
    """A file's entry in the manifest."""
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}


class _Unpickler(pickle.Unpickler):
    """Of ``.metadata``: no code is executed."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _MAY_LOAD.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def _metadata(folder: Path) -> Any:
    with (folder / ".metadata").open("rb") as file:
        return _Unpickler(file).load()


def _tried(path: Path, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except OSError as error:
        raise _refused(path, error) from error


def _refused(path: Path, error: BaseException) -> UserError:
    said = str(error).partition("\n")[0]
    return UserError(
        f"{path}: can't be saved ({said}). Each rank writes its part: all nodes need the run's folder on a"
        " disk that they share. Older checkpoints are untouched."
    )
