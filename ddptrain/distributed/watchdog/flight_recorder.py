"""Which collective a rank waits in, by NCCL's flight recorder: torch keeps the last 2,000 of a process
(https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html)."""

import json
import math
from typing import Any

from ddptrain.torch_private import nccl_trace

_SIZES = {
    "Float": 4,
    "Double": 8,
    "Half": 2,
    "BFloat16": 2,
    "Long": 8,
    "Int": 4,
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
}
"""Bytes, by torch's names."""

Pending = tuple[str, int, str]
"""A collective: its group, its number in it, and what it is in words."""


def collectives() -> tuple[dict[str, int], Pending | None]:
    """The number of the last collective that this rank has begun, by group, and the first that is not over.
    Nothing without NCCL, and where another torch writes it otherwise: a hang is reported all the same."""
    try:
        entries = json.loads(nccl_trace() or b"{}").get("entries", [])
        begun: dict[str, int] = {}
        for entry in entries:
            begun[_group(entry)] = max(begun.get(_group(entry), 0), entry["collective_seq_id"])
        waiting = [entry for entry in entries if entry["state"] != "completed" and not entry["is_p2p"]]
        if not waiting:
            return begun, None
        first = min(waiting, key=lambda entry: entry["time_created_ns"])
        return begun, (_group(first), first["collective_seq_id"], _in_words(first))
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}, None


def _group(entry: dict[str, Any]) -> str:
    return ", ".join(dict.fromkeys(entry["process_group"]))


def _in_words(entry: dict[str, Any]) -> str:
    """``all_reduce of 4.2 MB``."""
    pairs = zip(entry["input_sizes"], entry["input_dtypes"], strict=True)
    size = sum(math.prod(shape) * _SIZES.get(dtype, 4) for shape, dtype in pairs)
    amount = f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size:,} bytes"
    return f"{entry['profiling_name'].rpartition(':')[2]} of {amount}"
