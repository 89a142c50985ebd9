"""Who holds the job up, from what each rank last said of itself."""

import sys
import threading
import traceback
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

_COLLECTIVES = "torch/distributed/"
_OURS = (
    *("ddptrain/distributed/", "ddptrain/engine/", "ddptrain/strategies/", "ddptrain/api/strategy.py"),
    *("ddptrain/torch_private.py", "torch/nn/parallel/distributed.py", "torch/_ops.py"),
)
"""The last: an operator called by name, which waits where the device's queue is full, behind a collective."""
_STEP = ("waiting for a batch", "forward", "backward", "optimizer")
_WAITING_FUNCTIONS = ("_engine_run_backward", "synchronize")


class Beat(NamedTuple):
    """What a rank says of itself, every second or so."""

    rank: int
    number: int
    """Counts the beats; one that stays shows a process that does not run."""
    marks: int
    """Marks its main thread has passed."""
    step: int
    what: str
    overdue: bool
    """Its main thread has passed none for longer than allowed."""
    host: str = ""
    pid: int = 0
    born: str = ""
    """`started_at` of its process."""
    stack: str = ""
    waits: str = ""
    """Where its main thread waits for other ranks: ``engine``, or ``recipe``: a collective that the recipe's
    own code calls. '' if it does not."""

    @property
    def order(self) -> tuple[int, int]:
        """How far it is, compared with other ranks."""
        return self.step, _STEP.index(self.what) if self.what in _STEP else len(_STEP)

    @property
    def place(self) -> str:
        return f"step {self.step}, {self.what}"

    @classmethod
    def unheard(cls, rank: int) -> "Beat":
        return cls(rank, -1, -1, 0, "not heard of since the start", overdue=False)


def stack_of(thread: int) -> traceback.StackSummary:
    """A thread's frames, the innermost last.

    A backward pass on a GPU runs in threads of autograd's own, while the one that asked for it waits: what
    Python runs in these, a hook or a backward of one's own, follows.
    """
    frames = sys._current_frames()
    ours = {known.ident for known in threading.enumerate() if not isinstance(known, threading._DummyThread)}
    stack = traceback.StackSummary()
    for frame in [frames.get(thread), *(frames[other] for other in frames.keys() - ours)]:
        stack += traceback.extract_stack(frame) if frame is not None else []
    return stack


def waits(frames: Sequence[tuple[str, str]]) -> str:
    """Whether, and on whose behalf, a thread waits for other ranks (`Beat.waits`).

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

    Those that do not answer; else those outside of a collective; else, where all wait, the fewer of
    those that wait for different things, or those ahead: they have left one out. A GPU's host may be a step
    ahead, and stand where the device's queue is full: of those outside, the ones behind hold it up.
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
    ahead = max(order for order, count in places.items() if count == fewest)
    return [beat for beat in beats if beat.order == ahead]


def describe(blamed: Sequence[Beat], beats: Sequence[Beat], silent: Sequence[Beat], timeout: float) -> str:
    """The message: who, where, its stack, and what the others wait for."""
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
    return "\n".join(lines)


def describe_cut(host: str, beats: Sequence[Beat], timeout: float) -> str:
    """The message on a host that no longer reaches the host of rank 0, by which it would hear of others."""
    ranks: dict[str, list[int]] = {}
    for beat in beats:
        ranks.setdefault(beat.host or "a host unheard of", []).append(beat.rank)
    names = {name: f"{name} ({_ranks(found)})" for name, found in ranks.items()}
    keeper = next(beat for beat in beats if beat.rank == 0)
    others = [names[name] for name in names if name not in (host, keeper.host)]
    unknown = f" By it ranks hear of each other: nothing is known of {', '.join(others)}." if others else ""
    own = next(beat for beat in beats if beat.host == host)
    return (
        f"{host} has not reached {keeper.host} for hang_timeout={timeout:g} s, and its ranks are ended.\n"
        f"{names[keeper.host]} is lost, or the link to it, or rank 0 is stopped.{unknown}\n"
        f"rank {own.rank} waits for it at {own.place}{_innermost(own.stack)}."
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def _innermost(stack: str) -> str:
    frames = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    return f" ({frames[-1].rpartition(', in ')[2]})" if frames else ""
