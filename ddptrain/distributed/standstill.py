"""Who holds the job up, from what each rank last said of itself."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

_COLLECTIVE_FILES = ("torch/distributed/", "torch/nn/parallel/distributed.py", "ddptrain/distributed/comm.py")
_COLLECTIVE_FUNCTIONS = ("_engine_run_backward", "synchronize")


class Beat(NamedTuple):
    """What a rank says of itself, every second or so."""

    rank: int
    number: int
    """Counts the beats; one that stays shows a process that does not run."""
    marks: int
    """Marks its main thread has passed; all ranks pass the same ones."""
    step: int
    what: str
    overdue: bool
    """Its main thread has passed none for longer than allowed."""
    host: str = ""
    pid: int = 0
    stack: str = ""
    waits: bool = False
    """Its main thread is inside a collective (or in backward, where DDP has them)."""

    @property
    def place(self) -> str:
        return f"step {self.step}, {self.what}"

    @classmethod
    def unheard(cls, rank: int) -> "Beat":
        return cls(rank, -1, -1, 0, "not heard of since the start", overdue=False)


def waits(path: str, function: str) -> bool:
    """Whether a thread whose innermost Python frame is this one waits for other ranks."""
    return any(part in path for part in _COLLECTIVE_FILES) or function in _COLLECTIVE_FUNCTIONS


def guilty(beats: Sequence[Beat], silent: Sequence[Beat]) -> list[Beat]:
    """The ranks that the others wait for.

    Those that do not answer; else those outside of a collective; else, where all wait, the fewer of
    those that wait for different things, or the one that is ahead: it has left one out.
    """
    if silent:
        return list(silent)
    if outside := [beat for beat in beats if not beat.waits]:
        return outside
    places = Counter(beat.marks for beat in beats)
    if len(places) == 1:
        return list(beats)
    fewest = min(places.values())
    ahead = max(marks for marks, count in places.items() if count == fewest)
    return [beat for beat in beats if beat.marks == ahead]


def describe(blamed: Sequence[Beat], beats: Sequence[Beat], silent: Sequence[Beat], timeout: float) -> str:
    """The message: who, where, its stack, and what the others wait for."""
    lines = [f"the job has stood still for hang_timeout={timeout:g} s, and is ended."]
    for beat in blamed:
        if beat in silent:
            lines.append(
                f"rank {beat.rank} (pid {beat.pid} on {beat.host or 'its node'}) does not answer: stopped,"
                f" or its machine is gone. Last heard of at {beat.place}."
            )
        else:
            lines.append(f"rank {beat.rank} holds it up at {beat.place}. Its stack:\n{beat.stack.rstrip()}")
    for beat in beats:
        if beat not in blamed:
            lines.append(f"rank {beat.rank} waits for it at {beat.place}{_innermost(beat.stack)}.")
    return "\n".join(lines)


def _innermost(stack: str) -> str:
    frames = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    return f" ({frames[-1].rpartition(', in ')[2]})" if frames else ""
