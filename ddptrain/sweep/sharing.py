"""Which job of a sweep trains what several have in common, and where the others go on from it.

A job that trains for others does so in its own folder. It stops at the step where another one branches off
(``train.step_limit``); that one's folder is made of its state; and both go on. As a run that is stopped and
goes on has the bits of one that never was, so has a branch.
"""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from ddptrain.sweep.beginnings import Beginnings, family_of
from ddptrain.sweep.board import Board
from ddptrain.sweep.branch import best_step, branch, clear, manifests
from ddptrain.sweep.ledger import Job, Ledger
from ddptrain.text import parse_yaml

_WORTH = 0.05
"""Share of a job's steps that a beginning has to be: to stop and go on takes seconds."""


class Branch(NamedTuple):
    """Where a job goes on from another one."""

    trunk: int
    """The other one's number."""
    step: int


class Saved(NamedTuple):
    """What a job that does not run has in its folder."""

    newest: int = 0
    """The step of its newest checkpoint; 0 where it has none."""
    points: tuple[int, ...] = ()
    """The steps from which another one may go on."""


class Sharing:
    """Asked by the pool, which holds the jobs."""

    def __init__(self, ledger: Ledger, beginnings: Beginnings, ranks: int, board: Board) -> None:
        """ranks: of each job."""
        self._ledger = ledger
        self._beginnings = beginnings
        self._ranks = ranks
        self._board = board
        self._jobs = {job.number: job for job in ledger.jobs if job.number in beginnings.steps}
        self._branches: dict[int, Branch] = {}
        self._saved: dict[int, Saved] = {}
        """Of jobs that have not run since they were looked at."""
        for job in self._jobs.values():
            clear(ledger.folder / job.folder)

    def plan(self, waiting: Iterable[Job], running: Iterable[Job]) -> None:
        """Choose for each waiting job that has not begun where it goes on from, and make the folders of those
        for which that has been trained. To be called at first, and whenever a job has ended."""
        idle = {job.number for job in waiting} & self._jobs.keys()
        busy = {job.number: job.limit or math.inf for job in running if job.number in self._jobs}
        due = True
        while due:
            self._look(busy)
            self._branches = branches(self._beginnings, idle, busy, self._saved)
            due = False
            for number, (trunk, step) in self._branches.items():
                if trunk in self._saved and step in self._saved[trunk].points:
                    due = True
                    if not self._go_on(self._jobs[number], self._jobs[trunk], step):
                        break

    def waits(self, job: Job) -> bool:
        """Whether a job is to be started later, from what another one trains."""
        return job.number in self._branches

    def begins(self, job: Job) -> int | None:
        """A job is about to start. Returns the step at which it has to stop for others."""
        own = self._saved.pop(job.number, Saved())
        steps = [found.step for found in self._branches.values() if found.trunk == job.number]
        assert all(step > own.newest for step in steps), "it would stop at once, again and again"
        return min(steps, default=None)

    def has_paused(self, job: Job) -> bool:
        """Whether a job that has stopped by itself did so at its limit."""
        return job.limit is not None and job.limit in manifests(self._ledger.folder / job.folder)

    def concerns(self, job: Job) -> bool:
        """Whether others wait for a job."""
        return any(found.trunk == job.number for found in self._branches.values())

    def _look(self, busy: Container[int]) -> None:
        """At the folders of jobs that do not run."""
        for number, job in self._jobs.items():
            if number in busy:
                self._saved.pop(number, None)
            elif number not in self._saved:
                folder = self._ledger.folder / job.folder
                self._saved[number] = _saved_in(folder)
                reads = [found.get("reads_progress", True) for found in manifests(folder).values()]
                if any(reads) and self._beginnings.divide(number, only_lengths=True):
                    self._refuse(job, "reads At.progress: nothing is shared with jobs of other lengths")

    def _refuse(self, job: Job, why: str) -> None:
        self._ledger.write(job, "not shared", why=why)
        self._board.say(f"{job.folder}  {why}")

    def _go_on(self, job: Job, trunk: Job, step: int) -> bool:
        """Have a job go on from another one's checkpoint. False where that turns out to be wrong."""
        home = self._ledger.folder
        if why := self._difference(job, trunk, step):
            self._beginnings.divide(job.number, only_lengths=False)
            self._refuse(job, f"does not go on from {trunk.folder}: {why}")
            return False
        branch(home / trunk.folder, step, home / job.folder)
        del self._saved[job.number]
        steps = self._beginnings.steps[job.number]
        self._ledger.write(job, "shared", trunk=trunk.number, step=step, steps=steps)
        self._board.say(f"{job.folder}  goes on from step {step} of {trunk.folder}")
        return True

    def _difference(self, job: Job, trunk: Job, step: int) -> str:
        """What a trunk has been trained with that the job would not have been; empty where there is
        nothing."""
        folder = self._ledger.folder / trunk.folder
        manifest = manifests(folder)[step]
        expected = self._beginnings.train_size[job.number]
        if expected is not None and manifest.get("train_size") != expected:
            return f"its data has {manifest.get('train_size')} samples, not {expected}"
        if manifest.get("world_size") != self._ranks:
            return f"that one was trained on {manifest.get('world_size')} ranks"
        try:
            tree = parse_yaml((folder / "config.yaml").read_text())
            same = family_of(tree) == family_of(asdict(self._beginnings.configs[job.number]))
        except (OSError, ValueError, TypeError, KeyError):
            return "that one's config.yaml can't be read"
        return "" if same else "a config holds what is its own job's, as ${run.dir}"


def savings(beginnings: Beginnings, jobs: Sequence[Job], folder: Path) -> list[str]:
    """What a sweep says before it starts. folder: the sweep's."""
    if beginnings.problem:
        return [f"note  no steps are shared: {beginnings.problem}"]
    notes = [f"note  {beginnings.note}"] if beginnings.note else []
    left = [job.number for job in jobs if job.number in beginnings.steps and job.status != "done"]
    saved = {job.number: _saved_in(folder / job.folder) for job in jobs}
    shared = sum(found.step for found in branches(beginnings, left, {}, saved).values())
    steps = sum(beginnings.steps[n] - saved[n].newest for n in left)
    text = f"{shared:,} of {steps:,} steps are trained once for several jobs (sweep.share)"
    return [*notes, *([text] if shared else [])]


def _saved_in(folder: Path) -> Saved:
    steps, best = list(manifests(folder)), best_step(folder)
    return Saved(max(steps, default=0), tuple(step for step in steps if step >= best))


def branches(
    beginnings: Beginnings,
    idle: Iterable[int],
    busy: Mapping[int, float],
    saved: Mapping[int, Saved],
) -> dict[int, Branch]:
    """Where each idle job that has nothing saved branches off, if it does: together as late as can be, a
    maximal spanning tree (Prim's algorithm).

    busy: running jobs, and the steps at which they stop. saved: of all others.
    """
    found: dict[int, Branch] = {}
    going = {number for number in idle if saved[number].newest} | busy.keys()
    """Those that will get further than they are, with what they have begun or branch off from."""
    left = set(idle) - going
    offers: dict[int, tuple[int, bool, int]] = {}
    """For each that is left: the latest step, whether the trunk is as long, minus the trunk."""

    def offer(trunk: int) -> None:
        own = saved.get(trunk, Saved())
        at = busy.get(trunk, found[trunk].step if trunk in found else own.newest)
        for number in left.intersection(beginnings.relatives(trunk)):
            common = beginnings.common(trunk, number)
            reaches = trunk in going and (at < common or (at == common and trunk not in saved))
            step = common if reaches else max((point for point in own.points if point <= common), default=0)
            if step >= _WORTH * beginnings.steps[number]:
                same = beginnings.steps[trunk] == beginnings.steps[number]
                offers[number] = max(offers.get(number, (0, False, 0)), (step, same, -trunk))

    for trunk in [*busy, *saved]:
        if trunk not in left:
            offer(trunk)
    while left:
        number = max(offers, key=lambda number: (offers[number], -number)) if offers else min(left)
        if number in offers:
            step, _, trunk = offers.pop(number)
            found[number] = Branch(-trunk, step)
        left.remove(number)
        going.add(number)
        offer(number)
    return found
