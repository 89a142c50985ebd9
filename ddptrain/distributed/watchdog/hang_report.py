"""Finds the rank that the others wait for, from the ranks' last heartbeats."""

import sys
import threading
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ddptrain.text import named_ranks

_COLLECTIVES = "torch/distributed/"
_OURS = (
    *("ddptrain/distributed/", "ddptrain/engine/", "ddptrain/strategies/", "ddptrain/api/strategy.py"),
    *("ddptrain/torch_private.py", "torch/nn/parallel/distributed.py", "torch/_ops.py"),
)
"""The last one: an operator, which waits if the device's queue is full because of a collective."""
_EVERYBODY = "default_pg"
"""In the name of the group of all ranks."""
_STEP = ("waiting for a batch", "forward", "backward", "optimizer")
_WAITING_FUNCTIONS = ("_engine_run_backward", "synchronize")


class Beat(NamedTuple):
    """The heartbeat of a rank, sent about once a second."""

    rank: int
    number: int
    """Counts the heartbeats. If it stays the same, the process is not running."""
    marks: int
    """Marks of its main thread so far."""
    step: int
    what: str
    overdue: bool
    """Its main thread has made no mark for longer than allowed."""
    host: str = ""
    pid: int = 0
    born: str = ""
    """`started_at` of its process."""
    stack: str = ""
    waits: str = ""
    """``engine`` or ``recipe`` (a collective in the recipe's code) if its main thread waits for other ranks,
    else ''."""
    begun: Mapping[str, int] = MappingProxyType({})
    """Where NCCL tells it: the number of the last collective that it has begun, by group."""
    pending: Sequence[Any] | None = None
    """And the first that is not over: group, number, and what it is."""

    @property
    def order(self) -> tuple[int, int]:
        """Its progress, for comparison with other ranks."""
        return self.step, _STEP.index(self.what) if self.what in _STEP else len(_STEP)

    @property
    def place(self) -> str:
        return f"step {self.step}, {self.what}"

    @classmethod
    def unheard(cls, rank: int) -> "Beat":
        return cls(rank, -1, -1, 0, "not heard of since the start", overdue=False)


def stack_of(thread: int) -> traceback.StackSummary:
    """A thread's frames, the innermost last.

    A backward pass on a GPU runs in autograd's threads while the calling thread waits. The Python frames of
    these threads (hooks, custom backward functions) follow.
    """
    frames = sys._current_frames()
    ours = {known.ident for known in threading.enumerate() if not isinstance(known, threading._DummyThread)}
    stack = traceback.StackSummary()
    for frame in [frames.get(thread), *(frames[other] for other in frames.keys() - ours)]:
        stack += traceback.extract_stack(frame) if frame is not None else []
    return stack


def waits(frames: Sequence[tuple[str, str]]) -> str:
    """Whether a thread waits for other ranks, and in whose code (`Beat.waits`).

    frames: (file, function) of its Python frames, the innermost last.
    """
    if not frames:
        return ""
    path, function = frames[-1]
    if function in _WAITING_FUNCTIONS or any(part in path for part in _OURS):
        return "engine"
    if _COLLECTIVES not in path:
        return ""
    caller = next((path for path, _ in reversed(frames) if _COLLECTIVES not in path), "")
    return "engine" if any(part in caller for part in _OURS) else "recipe"


def guilty(beats: Sequence[Beat], silent: Sequence[Beat]) -> list[Beat]:
    """The ranks that the others wait for.

    Those that do not answer; else those outside of a collective; else, if all wait, the smaller group of
    those that wait in different places, or those ahead, which have skipped a collective. A GPU's host may be
    one step ahead and wait because the device's queue is full: of the ranks outside, those at the earliest
    step.
    """
    if silent:
        return list(silent)
    if outside := [beat for beat in beats if not beat.waits]:
        return [beat for beat in outside if beat.step == min(other.step for other in outside)]
    kinds = Counter(beat.waits for beat in beats)
    if len(kinds) == 2:
        fewest = min(kinds.values())
        return [beat for beat in beats if kinds[beat.waits] == fewest]
    places = Counter(beat.order for beat in beats)
    fewest = min(places.values())
    furthest = max(order for order, count in places.items() if count == fewest)
    return [beat for beat in beats if beat.order == furthest]


def describe(blamed: Sequence[Beat], beats: Sequence[Beat], silent: Sequence[Beat], timeout: float) -> str:
    """The message: the rank, its place and stack, and where the others wait."""
    lines = [f"the job has stood still for hang_timeout={timeout:g} s, and is ended."]
    for beat in blamed:
        if beat in silent:
            lines.append(
                f"rank {beat.rank} (pid {beat.pid} on {beat.host or 'its node'}) does not answer: stopped,"
                f" or its machine or the link to it is gone. Last heard of at {beat.place}."
            )
        else:
            lines.append(f"rank {beat.rank} holds it up at {beat.place}. Its stack:\n{beat.stack.rstrip()}")
    for beat in beats:
        if beat not in blamed:
            lines.append(f"rank {beat.rank} waits for it at {beat.place}{_innermost(beat.stack)}.")
    return "\n".join([*lines, *_collective(beats)])


def _collective(beats: Sequence[Beat]) -> list[str]:
    """The first collective that is not over on some rank, and who of its group has not begun it."""
    pending = [tuple(beat.pending) for beat in beats if beat.pending]
    if not pending:
        return []
    group, number, what = min(pending, key=lambda one: (-pending.count(one), one[1]))
    answering = [beat for beat in beats if beat.begun]
    silent = [beat.rank for beat in beats if not beat.begun]
    # of another group it is not known who belongs to it
    members = [beat for beat in answering if group in beat.begun or _EVERYBODY in group]
    absent = [beat.rank for beat in members if beat.begun.get(group, 0) < number]
    said = [f"{named_ranks(absent)} did not begin it"] if absent else []
    said += [f"{named_ranks(silent)} can't be asked"] if silent else []
    who = ", ".join(said) or "all that are in it have begun it, so look at the network and the GPUs"
    return [f"NCCL waits in {what}, number {number:,} of group {group}: {who}."]


def describe_cut(host: str, beats: Sequence[Beat], timeout: float) -> str:
    """The message on a host that has lost contact with the host of rank 0, which relays all heartbeats."""
    ranks: dict[str, list[int]] = {}
    for beat in beats:
        ranks.setdefault(beat.host or "a host unheard of", []).append(beat.rank)
    names = {name: f"{name} ({named_ranks(on_host)})" for name, on_host in ranks.items()}
    keeper = next(beat for beat in beats if beat.rank == 0)
    others = [names[name] for name in names if name not in (host, keeper.host)]
    unknown = f" By it ranks hear of each other: nothing is known of {', '.join(others)}." if others else ""
    own = next(beat for beat in beats if beat.host == host)
    return (
        f"{host} has not reached {keeper.host} for hang_timeout={timeout:g} s, and its ranks are ended.\n"
        f"{names[keeper.host]} is lost, or the link to it, or rank 0 is stopped.{unknown}\n"
        f"rank {own.rank} waits for it at {own.place}{_innermost(own.stack)}."
    )


def _innermost(stack: str) -> str:
    frames = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    return f" ({frames[-1].rpartition(', in ')[2]})" if frames else ""
