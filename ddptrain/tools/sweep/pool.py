"""Runs the jobs of a sweep: starts what there is room for, watches, and writes down how each ends."""

import math
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from types import FrameType

from ddptrain.config.schema import Config
from ddptrain.errors import ExitCode, Stopped, UserError
from ddptrain.text import counted
from ddptrain.tools.sweep.board import Board
from ddptrain.tools.sweep.ledger import Job, Ledger
from ddptrain.tools.sweep.machines import COSTS, Attempt, Machines
from ddptrain.tools.sweep.pruning_requests import PruningRequests
from ddptrain.tools.sweep.pruning_rules import PruningRule

_AFTER_GRACE_S = 10.0
"""For what follows a save: closing down, and launch's own end."""
_REPEATED_SIGNAL_S = 1.0
"""A signal that comes again within this time is the same request, from a scheduler that signals all."""
_MOST_STALLS = 3
_MENDABLE = (ExitCode.CRASH, ExitCode.HUNG)
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_STARTS = ("stopped", "new", "failed", "timeout")
More = Callable[[], tuple[Job, Config] | None]
"""One more job of a search, asked for when there is room; None where it has no more."""


class Pool:
    """One process does all of it, in one thread: jobs are started, asked to stop and judged here only."""

    def __init__(self, ledger: Ledger, machines: Machines, rule: PruningRule, board: Board) -> None:
        self._ledger = ledger
        self._machines = machines
        self._rule = rule
        self._board = board
        self._running: dict[int, Attempt] = {}
        self._requests: dict[int, PruningRequests] = {}
        self._waiting: deque[Job] = deque()
        self._configs: MutableMapping[int, Config] = {}
        self._rivals: list[Job] = []
        self._more: More = lambda: None
        self._crashes: Counter[int] = Counter()
        self._stalls: Counter[int] = Counter()
        """Attempts in a row that were interrupted before they got further."""
        self._stop: signal.Signals | None = None
        self._stopped_at = math.inf
        self._leaves = False

    def run(
        self, jobs: MutableMapping[int, Config], rivals: Container[int], more: More = lambda: None
    ) -> None:
        """Run the jobs of these numbers, those that are not done, until all have ended.

        rivals: numbers of the jobs that each is measured against where jobs are pruned, these among them.
        more: jobs that are added to both as there is room for them.
        Raises Stopped after SIGTERM or SIGUSR1, KeyboardInterrupt after SIGINT, once every job has saved and
        ended, or has been killed.
        """
        self._configs, self._more = jobs, more
        self._rivals = [job for job in self._ledger.jobs if job.number in rivals]
        mine = [job for job in self._ledger.jobs if job.number in jobs]
        for job in mine:
            self._adopt(job)
        self._waiting.extend(job for job in mine if job.status == "stopped")
        self._waiting.extend(job for job in mine if job.status in _STARTS[1:])
        try:
            with self._signals_handled(), self._board.showing():
                while not self._leaves and (self._start() or self._running):
                    time.sleep(self._machines.tick)
                    self._machines.refresh(list(self._running.values()))
                    for number, attempt in list(self._running.items()):
                        self._answer(attempt)
                        self._look_after(number, attempt)
                    self._board.refresh(self._ledger.jobs)
        finally:
            for attempt in self._running.values():  # left behind, or something of ours has failed
                attempt.leave()
        if self._leaves:
            raise Stopped(f"sweep stopped by SIGHUP; {counted(len(self._running), 'job')} run on")
        if self._stop is not None:
            self._board.say(f"sweep stopped by {self._stop.name}; start the same line again and it goes on")
        if self._stop == signal.SIGINT:
            raise KeyboardInterrupt
        if self._stop is not None:
            raise Stopped(f"sweep stopped by {self._stop.name}")

    def _adopt(self, job: Job) -> None:
        """Follow a job that has gone on without its sweep, on other nodes."""
        if job.status not in ("queued", "running"):
            return
        if job.on != self._machines.name:
            raise UserError(
                f"sweep.on={self._machines.name}: job {job.folder} was started on {job.on} and may still run"
                f" there. Start the sweep with sweep.on={job.on}; if that cluster is gone, sweep into another"
                " folder: sweep.dir=..."
            )
        folder = self._ledger.folder / job.folder
        self._running[job.number] = self._machines.adopt(job, folder)
        self._requests[job.number] = PruningRequests(folder)

    def _start(self) -> bool:
        """Start what there is room for; whether there was something to start."""
        began = False
        while self._stop is None and len(self._running) < self._machines.parallel:
            job = self._next()
            if job is None:
                break
            began = True
            folder = self._ledger.folder / job.folder
            requests = self._requests[job.number] = PruningRequests(folder)
            config = self._configs[job.number]
            words = self._machines.command(job, self._ledger.folder, config)
            metrics = [name for name in config.sweep.objectives or () if name not in COSTS]
            words.append(requests.controller(self._rule.prunes, metrics))
            where = self._machines.take()
            facts = {"on": self._machines.name, "on_cpu": self._machines.on_cpu, "gpus": where}
            self._ledger.write(job, "started", **facts)
            self._running[job.number] = self._machines.start(job, words, folder, where)
            self._board.changed(job)
        return began

    def _next(self) -> Job | None:
        if self._waiting:
            return self._waiting.popleft()
        return self._revived(idle=False) or self._next_of_search() or self._revived(idle=not self._running)

    def _revived(self, idle: bool) -> Job | None:
        for job in self._rule.revivable(self._rivals, idle):
            if job.number in self._configs:
                share = job.evaluations[-1].share if job.evaluations else 0.0
                self._ledger.write(job, "promoted", share=share)
                return job
        return None

    def _next_of_search(self) -> Job | None:
        """The next job of a search that is to be started, past those that have run. None while the last one
        waits for a scheduler: what ends meanwhile is learnt from."""
        if any(attempt.waits for attempt in self._running.values()):
            return None
        while (added := self._more()) is not None:
            job, config = added
            if job.number not in self._configs:
                self._configs[job.number] = config
                self._rivals.append(job)
                if job.status in _STARTS:
                    return job
        return None

    def _answer(self, attempt: Attempt) -> None:
        """Whether the job goes on, after each evaluation that it has done meanwhile."""
        job = attempt.job
        for request in self._requests[job.number].unanswered():
            self._ledger.write(job, "evaluated", **request)
            waiting = bool(self._waiting) or any(other.waits for other in self._running.values())
            share = request["step"] / request["steps"]
            # an evaluation that is repeated after a kill was judged before, beside jobs that had got less far
            goes_on = share <= job.passed or self._rule.goes_on(job, self._rivals, waiting)
            self._ledger.write(job, "verdict", share=share, goes_on=goes_on)
            self._requests[job.number].answer(goes_on)

    def _look_after(self, number: int, attempt: Attempt) -> None:
        job, config = attempt.job, self._configs[number]
        if attempt.node and job.status == "queued":
            self._ledger.write(job, "began", node=attempt.node)
            self._board.changed(job)
        grace = config.checkpoint.grace + _AFTER_GRACE_S
        if self._stop is not None:
            attempt.stop("stopped", grace)
        elif attempt.seconds > (config.sweep.timeout or math.inf):
            attempt.stop("timeout", grace)
        if (code := attempt.ended()) is None:
            return
        self._answer(attempt)  # its last request may have come after the look at them
        pruned = bool(job.evaluations) and job.passed < job.evaluations[-1].share
        status, why, figures = attempt.outcome(code, pruned)
        # asked to by an earlier process of this sweep, which has not seen its end
        adopted = attempt.stopped_for == "stopped" and self._stop is None
        again = status == "stopped" and (bool(why) or adopted)
        if again:
            self._stalls[number] = 0 if attempt.got_further else self._stalls[number] + 1
            if self._stalls[number] == _MOST_STALLS:
                status, again = "failed", False
                why += f"; {_MOST_STALLS} attempts got no further than the checkpoint that they began with"
        facts = {"status": status, "code": code, "why": why, "seconds": round(attempt.seconds, 2)}
        facts |= {"objectives": config.sweep.objectives} if config.sweep.objectives else {}
        self._ledger.write(job, "ended", **facts, **figures)
        del self._running[number]
        lost = self._machines.release(job.gpus, status == "failed")
        for gpu in lost:
            self._board.say(f"{gpu} is lost: it takes no more jobs, and {job.folder} waits for another GPU")
        crashed = status == "failed" and (code in _MENDABLE or code > 128)
        self._crashes[number] += crashed
        if again or lost or (crashed and self._crashes[number] <= config.sweep.retries):
            self._waiting.append(job)
        self._board.changed(job)

    @contextmanager
    def _signals_handled(self) -> Iterator[None]:
        """The first asks all jobs to save and stop; another one kills them."""

        def handle(number: int, _: FrameType | None) -> None:
            if time.monotonic() - self._stopped_at > _REPEATED_SIGNAL_S:
                for attempt in self._running.values():
                    attempt.kill()
            if number == signal.SIGHUP and self._machines.outlive:
                self._leaves = True
            elif self._stop is None:
                self._stop, self._stopped_at = signal.Signals(number), time.monotonic()

        by_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        handled = [number for number in _STOPS if number != signal.SIGHUP or not by_nohup]
        before = {number: signal.signal(number, handle) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def unfinished(jobs: Sequence[Job], rule: PruningRule) -> list[Job]:
    """Jobs that a sweep would start, or may."""
    over = ("done", "pruned") if rule.prunes else ("done",)
    return [job for job in jobs if job.status not in over]
