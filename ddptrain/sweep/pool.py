"""Runs the jobs of a sweep over its slots: starts what fits, watches, and writes down how each ends."""

import math
import signal
import time
from collections import Counter, deque
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ddptrain.config.schema import Config
from ddptrain.errors import ExitCode, Stopped
from ddptrain.sweep.board import Board
from ddptrain.sweep.ledger import Job, Ledger
from ddptrain.sweep.process import JobProcess, command
from ddptrain.sweep.pruning_rules import PruningRule
from ddptrain.sweep.pruning_server import PruningServer
from ddptrain.sweep.slots import Slots

_TICK_S = 0.1
_AFTER_GRACE_S = 10.0
"""For what follows a save: closing down, and launch's own end."""
_REPEATED_SIGNAL_S = 1.0
"""A signal that comes again within this time is the same request, from a scheduler that signals all."""
_MENDABLE = (ExitCode.CRASH, ExitCode.HUNG)
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Pool:
    """One process does all of it, in one thread: jobs are started, asked to stop and judged here only."""

    def __init__(self, ledger: Ledger, slots: Slots, rule: PruningRule, board: Board) -> None:
        self._ledger = ledger
        self._slots = slots
        self._rule = rule
        self._board = board
        self._free = list(slots.names)
        self._running: dict[int, JobProcess] = {}
        self._waiting: deque[Job] = deque()
        self._configs: dict[int, Config] = {}
        self._attempts: Counter[int] = Counter()
        self._stop: signal.Signals | None = None
        self._stopped_at = math.inf

    def run(self, jobs: Mapping[int, Config], rivals: Container[int]) -> None:
        """Run the jobs of these numbers, those that are not done, until all have ended.

        rivals: numbers of the jobs that each is measured against where jobs are pruned, these among them.
        Raises Stopped after SIGTERM or SIGUSR1, KeyboardInterrupt after SIGINT, once every job has saved and
        ended, or has been killed.
        """
        self._configs = dict(jobs)
        self._rivals = [job for job in self._ledger.jobs if job.number in rivals]
        mine = [job for job in self._ledger.jobs if job.number in jobs]
        self._waiting.extend(job for job in mine if job.status == "stopped")
        self._waiting.extend(job for job in mine if job.status in ("new", "failed", "timeout"))
        self._server = PruningServer()
        try:
            with self._signals_handled(), self._board.showing():
                while self._start() or self._running:
                    self._server.serve(_TICK_S, self._answer)
                    self._look_after()
                    self._board.refresh(self._ledger.jobs)
        finally:
            for process in self._running.values():  # only where something of ours has failed
                process.kill()
            self._server.close()
        if self._stop is not None:
            self._board.say(f"sweep stopped by {self._stop.name}; start the same line again and it goes on")
        if self._stop == signal.SIGINT:
            raise KeyboardInterrupt
        if self._stop is not None:
            raise Stopped(f"sweep stopped by {self._stop.name}")

    def _start(self) -> bool:
        """Start what there is room for; whether there was something to start."""
        began = False
        while self._stop is None and len(self._running) < self._slots.parallel:
            job = self._next()
            if job is None:
                break
            began = True
            taken = [self._free.pop(0) for _ in range(self._slots.per_job)]
            folder = self._ledger.folder
            words = command(job, folder, self._slots, self._configs[job.number])
            words.append(self._server.controller(job.number))
            self._attempts[job.number] += 1
            gpus = taken if self._slots.are_gpus else []
            self._ledger.write(job, "started", gpus=gpus, on_cpu=self._slots.on_cpu)
            environment = self._slots.environment(taken)
            self._running[job.number] = JobProcess(job, words, folder / job.folder, taken, environment)
            self._board.changed(job)
        return began

    def _next(self) -> Job | None:
        if self._waiting:
            return self._waiting.popleft()
        for job in self._rule.revivable(self._rivals, idle=not self._running):
            if job.number in self._configs:
                share = job.evaluations[-1].share if job.evaluations else 0.0
                self._ledger.write(job, "promoted", share=share)
                return job
        return None

    def _answer(self, question: Mapping[str, Any]) -> bool:
        """Whether the job that asks goes on."""
        if (process := self._running.get(question["job"])) is None:
            return False
        job = process.job
        facts = {name: question[name] for name in ("step", "steps", "metric", "value", "higher_is_better")}
        self._ledger.write(job, "evaluated", **facts)
        goes_on = self._rule.goes_on(job, self._rivals, waiting=bool(self._waiting))
        self._ledger.write(job, "verdict", share=question["step"] / question["steps"], goes_on=goes_on)
        return goes_on

    def _look_after(self) -> None:
        for number, process in list(self._running.items()):
            job, config = process.job, self._configs[number]
            grace = config.checkpoint.grace + _AFTER_GRACE_S
            if self._stop is not None:
                process.stop("stopped", grace)
            elif process.seconds > (config.sweep.timeout or math.inf):
                process.stop("timeout", grace)
            if (code := process.ended()) is None:
                continue
            pruned = bool(job.evaluations) and job.passed < job.evaluations[-1].share
            status, why, figures = process.outcome(code, pruned)
            facts = {"status": status, "code": code, "why": why, "seconds": round(process.seconds, 2)}
            self._ledger.write(job, "ended", **facts, **figures)
            del self._running[number]
            self._free = sorted([*self._free, *process.slots], key=self._slots.names.index)
            crashed = status == "failed" and (code in _MENDABLE or code > 128)
            if crashed and self._attempts[number] <= config.sweep.retries:
                self._waiting.append(job)
            self._board.changed(job)

    @contextmanager
    def _signals_handled(self) -> Iterator[None]:
        """The first asks all jobs to save and stop; another one kills them."""

        def handle(number: int, _: FrameType | None) -> None:
            if time.monotonic() - self._stopped_at > _REPEATED_SIGNAL_S:
                for process in self._running.values():
                    process.kill()
            if self._stop is None:
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
    over = ("done",) if type(rule) is PruningRule else ("done", "pruned")
    return [job for job in jobs if job.status not in over]
