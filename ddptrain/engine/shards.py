"""Checkpoints of which each rank writes its part, by torch.distributed.checkpoint.

The tensors stand in ``shards/`` beside ``state.pt``, where their names take their places.
"""

import hashlib
import pickle
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ddptrain.api.world import World
from ddptrain.distributed.comm import from_all_ranks, on_all_ranks
from ddptrain.distributed.foreach import mapped
from ddptrain.errors import UserError

FOLDER = "shards"
Empty = Callable[[torch.Size, torch.dtype], Tensor]


class Shards(NamedTuple):
    """What ranks have written, before it is part of a checkpoint."""

    folder: Path = Path()
    files: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """SHA-256 and bytes, by name; empty where no tensor is in parts."""


OF_A_RANK = r"__\d+_\d+\.distcp"
"""The file of a rank's part, as torch names it."""
_PLACE = "\0shard "
"""What begins the name that stands for a tensor: no value of a state does."""
_MAY_LOAD = {
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # of Python 3.13
}  # fmt: skip
"""All that torch's ``.metadata``, a pickle, needs."""


def without_parts(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A state with names in place of the tensors of which each rank has a part, and those by name."""
    parts: dict[str, Any] = {}

    def taken(value: Any) -> Any:
        if not hasattr(value, "full_tensor"):  # a DTensor; its module is slow to import
            return value
        parts[str(len(parts))] = value
        return f"{_PLACE}{len(parts) - 1}"

    return mapped(state, taken), parts


def new_folder(checkpoints: Path) -> Path:
    """For the files of all ranks. Raises UserError where there can't be one."""
    try:
        checkpoints.mkdir(exist_ok=True)
        # a name of its own: a node of a network file system may remember the one before under its name
        folder = checkpoints / f".shards-{uuid.uuid4().hex}"
        folder.mkdir()
        return folder
    except OSError as error:
        raise _refused(checkpoints, error) from error


def write_parts(
    parts: dict[str, Any], folder: Path, world: World, group: dist.ProcessGroup | None = None
) -> Shards:
    """Write them into a new folder, which all ranks see. Collectives, in a group of all ranks.

    Raises UserError, on all ranks, where the disk refuses or is not the same for all.
    """
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)  # a new thread has GPU 0, whose stream torch's writer asks for
    try:
        return Shards(folder, _written(parts, folder, world, group))
    except UserError:
        if world.is_first:
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def without_crc32() -> Iterator[None]:
    """What torch.save writes has no CRC-32, whose computing takes most of its time: the manifest has a
    SHA-256."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _written(
    parts: dict[str, Any], folder: Path, world: World, group: dist.ProcessGroup | None
) -> dict[str, dict[str, Any]]:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with without_crc32():
            save(parts, storage_writer=FileSystemWriter(folder), process_group=group)
    except CheckpointException as error:
        needed = sum(part.numel() * part.element_size() for part in parts.values())
        raise _refused(folder, next(iter(error.failures.values()))[0], needed) from error

    def own() -> dict[str, dict[str, Any]]:
        mine = [*folder.glob(f"__{world.rank}_*"), *(folder.glob(".metadata") if world.is_first else ())]
        try:
            return {path.name: entry_of(path) for path in mine}
        except OSError as error:
            raise _refused(folder, error) from error

    ranks = from_all_ranks(world, on_all_ranks(world, own, group), group)
    files = {name: entry for rank in ranks for name, entry in rank.items()}

    def all_there() -> None:
        for name, entry in files.items() if world.is_first else ():
            if not (folder / name).is_file() or (folder / name).stat().st_size != entry["bytes"]:
                raise _refused(folder, FileNotFoundError(f"rank 0 does not see {name}"))

    on_all_ranks(world, all_there, group)
    return files


def with_shards(state: dict[str, Any], folder: Path, empty: Empty) -> dict[str, Any]:
    """The state with the tensors of a verified folder in their places. empty: makes what is read into."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata = _metadata(folder)
    places: dict[str, Tensor] = {}

    def placed(value: Any) -> Any:
        if not (isinstance(value, str) and value.startswith(_PLACE)):
            return value
        name = value.removeprefix(_PLACE)
        about = metadata.state_dict_metadata[name]
        places[name] = empty(about.size, about.properties.dtype)
        return places[name]

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return metadata

    whole: dict[str, Any] = mapped(state, placed)
    with warnings.catch_warnings():  # that it reads alone, as it is asked to
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(dict(places), storage_reader=Reader(folder), no_dist=True)
    return whole


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
    """Raises UnpicklingError for anything but tensors in files that ranks have written: of another kind of
    entry torch would unpickle the bytes with whatever they ask for."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with (folder / ".metadata").open("rb") as file:
        metadata = _Unpickler(file).load()
    for name, about in metadata.state_dict_metadata.items():
        if type(about) is not TensorStorageMetadata:
            raise pickle.UnpicklingError(f"{name} is no tensor")
    for place in metadata.storage_data.values():
        if not re.fullmatch(OF_A_RANK, str(getattr(place, "relative_path", None))):
            raise pickle.UnpicklingError("a tensor lies elsewhere")
    return metadata


def _refused(path: Path, error: BaseException, needed: int = 0) -> UserError:
    said = str(error).partition("\n")[0]
    room = f"; {needed:,} bytes needed" if needed else ""
    return UserError(
        f"{path}: can't be saved ({said}{room}). Each rank writes its part: all nodes need the run's folder"
        " on a disk that they share, with room for it. Older checkpoints are untouched."
    )
