"""What tells samples from others without decoding them, for `Data.identity`."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset


def digest(facts: Iterable[bytes]) -> str:
    """A hash of these, in order."""
    sha256 = hashlib.sha256()
    for fact in facts:
        sha256.update(len(fact).to_bytes(8, "little"))
        sha256.update(fact)
    return sha256.hexdigest()


_LOOKED_INTO = 10_000
"""Files of a part up to which each is opened; of a million, it would take a share of them minutes."""
_TAIL = 64


def of_file(file: str, name: str, among: int) -> bytes:
    """Its name and size, and of a small part, of so many files, its last bytes: a PNG has its checksum there,
    a JPEG pixels. Not its time: a copy on another node has another one. Not all that it holds: reading a set
    would take as long as an epoch."""
    try:
        size = os.stat(file).st_size
        tail = b""
        if among <= _LOOKED_INTO:
            with open(file, "rb") as opened:
                opened.seek(max(0, size - _TAIL))
                tail = opened.read(_TAIL)
    except OSError:
        size, tail = -1, b""  # said by who reads it, or it is left out
    return os.fsencode(name) + b" %d " % size + tail


def of_tensor(values: Tensor) -> bytes:
    return values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def of_samples(dataset: Any, ids: Sequence[int]) -> Iterator[bytes]:
    """Of these samples of a map-style dataset, what it knows of each: all its attributes that have an entry
    for each sample (labels, names of files, pixels; not what it keeps of some that were read), or its number
    where there are none. A sample itself is not read."""
    if isinstance(dataset, Subset):
        yield from of_samples(dataset.dataset, [int(dataset.indices[i]) for i in ids])
        return
    if isinstance(dataset, ConcatDataset):
        each = [fact for inner in dataset.datasets for fact in of_samples(inner, range(len(inner)))]  # type: ignore[arg-type]
        yield from (each[i] for i in ids)
        return
    known = (
        dataset.tensors if isinstance(dataset, TensorDataset) else getattr(dataset, "__dict__", {}).values()
    )
    lists = [
        value for value in map(_listed, {id(value): value for value in known}.values()) if value is not None
    ]
    lists = [value for value in [*lists, *_of_rows(dataset)] if len(value) == len(dataset)]
    lists = [value for value in lists if not _is_filled_by_reading(value)]
    for i in ids:
        yield b" ".join(_plain(value[i], len(ids)) for value in lists) if lists else b"%d" % i


def label_column(dataset: Any) -> Sequence[int] | None:
    """The labels of a Hugging Face dataset, which decodes no picture for them; None of all else."""
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping) and "label" in features and hasattr(dataset, "with_format"):
        return list(dataset.with_format(None)["label"])  # a transform may ask for the pictures
    return None


def _of_rows(dataset: Any) -> list[Sequence[Any]]:
    """Of a Hugging Face dataset: its labels, and the rows that it has chosen (`select`, `shuffle`)."""
    labels, rows = label_column(dataset), getattr(dataset, "_indices", None)
    chosen = None if rows is None or not hasattr(rows, "column") else rows.column(0).to_pylist()
    return [values for values in (labels, chosen) if values is not None]


def _listed(value: Any) -> Sequence[Any] | None:
    """What may have an entry for each sample; None of all else."""
    if hasattr(value, "itertuples"):  # pandas
        return list(value.itertuples(index=False, name=None))
    if isinstance(value, Tensor | np.ndarray):
        return value if value.ndim else None  # type: ignore[return-value]
    return value if isinstance(value, list | tuple) else None


def _is_filled_by_reading(values: Sequence[Any]) -> bool:
    """Whether some samples are kept and others not yet: no fact of theirs, unless it is labels or names."""
    if not isinstance(values, list) or all(value is not None for value in values):
        return False
    return not any(_is_label(value) for value in values)


def _is_label(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_label, value))
    return isinstance(value, int | float | str | bytes | os.PathLike)


def _plain(value: Any, among: int) -> bytes:
    """The same bytes in every process; none of an object of which that can't be known. among: samples."""
    if isinstance(value, Tensor):
        return of_tensor(value) if value.layout == torch.strided else b""
    if isinstance(value, np.ndarray | np.generic):
        return b"" if value.dtype.hasobject else value.tobytes()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        # a copy of the set lies in another folder
        return (
            of_file(value, os.path.basename(value), among) if os.path.isfile(value) else repr(value).encode()
        )
    if isinstance(value, list | tuple):
        return b"(%b)" % b",".join(_plain(item, among) for item in value)
    if isinstance(value, dict):
        return _plain(list(value.items()), among)
    return repr(value).encode() if isinstance(value, int | float | bytes) else b""
