"""Kills at random moments of a training, whose progress is seen by what it leaves on the disk."""

import json
import os
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ddptrain.tools.prove.process import RunningCommand

_LOOK_EVERY_S = 0.001
_LOOK_FOR_RANKS_EVERY_S = 0.02
"""Searches all processes; ranks are there seconds before they train."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When something appeared on the disk."""

    mark: str
    """As `marks` names it."""
    step: int
    seconds: float
    """From then to the next one, in a run that nobody disturbed."""
    event: str


@dataclass(frozen=True, slots=True)
class Kill:
    """When to kill whom."""

    moment: Moment
    share: float
    """How much of the time to the next moment goes by before."""
    ahead: frozenset[str]
    """The marks of this moment and of those after it."""
    victims: Sequence[int]
    """Ranks."""

    def __str__(self) -> str:
        return f"{self.share * self.moment.seconds * 1000:.0f} ms after {self.moment.event}"


def marks(run: Path) -> set[str]:
    """What a run has left so far: ``line 3`` of its metrics, ``step-14``, before that ``.step-14``."""
    try:
        lines = (run / "metrics.jsonl").read_bytes().count(b"\n")
        saved = [name.split(".") for name in os.listdir(run / "checkpoints") if "step-" in name]
    except OSError:  # not there yet
        return set()
    folders = {parts[0] or f".{parts[1]}" for parts in saved}  # step-14, or .step-14.<pid>
    return folders | {f"line {n}" for n in range(1, lines + 1)}


def moments_of(running: RunningCommand, run: Path) -> list[Moment]:
    """Watch a run to its end: its moments in the order they came. The last one's time is 0."""
    mark_times: dict[str, float] = {}
    while not running.is_over:
        now = time.monotonic()
        for mark in sorted(marks(run) - mark_times.keys()):
            mark_times[mark] = now
        time.sleep(_LOOK_EVERY_S)
    running.finish()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = [*mark_times.values(), *list(mark_times.values())[-1:]]
    moments = []
    for mark, (begin, end) in zip(mark_times, pairwise(times), strict=True):
        number = int(re.split("[ -]", mark)[-1])
        what = "was being saved" if mark.startswith(".") else "was saved"
        if mark.startswith("line"):
            line = lines[number - 1]
            number, what = line["step"], "was evaluated" if line["split"] == "valid" else "was logged"
        moments.append(Moment(mark, number, end - begin, f"step {number} {what}"))
    return moments


def saved_step(run: Path) -> int:
    """The newest step that is on the disk as a whole; 0 without any."""
    return max((int(mark[len("step-") :]) for mark in marks(run) if mark.startswith("step-")), default=0)


def next_kill(
    draw: random.Random, timeline: Sequence[Moment], run: Path, ranks: int, still: int
) -> Kill | None:
    """A random one, of one rank or all of them; None where nothing is left of the run.

    still: how many are to come, with this one. It falls into the first of as many parts of what is left, or
    each would come closer to the end.
    """
    after = saved_step(run)
    left = [i for i, moment in enumerate(timeline[:-1]) if moment.step > after]
    if not left:
        return None
    i = draw.choice(left[: max(1, len(left) // still)])
    victims = draw.choice([*([rank] for rank in range(ranks)), list(range(ranks))])
    ahead = frozenset(moment.mark for moment in timeline[i:])
    return Kill(timeline[i], draw.random(), ahead, victims)


def carry_out(kill: Kill, running: RunningCommand, run: Path) -> bool:
    """Watch a run for the moment and kill then. False where it has ended before."""
    pids: dict[int, int] = {}
    while not running.is_over and not pids.keys() >= set(kill.victims):
        pids = running.pids()
        time.sleep(_LOOK_FOR_RANKS_EVERY_S)
    goes_on = False
    while not running.is_over:
        reached = marks(run) & kill.ahead
        if reached and goes_on:
            time.sleep(kill.share * kill.moment.seconds)
            break
        goes_on = goes_on or not reached  # what an earlier start has left of them, a resume cuts off
        time.sleep(_LOOK_EVERY_S)
    if running.is_over:
        running.finish()
        return False
    running.kill([pids[victim] for victim in kill.victims])
    return True
