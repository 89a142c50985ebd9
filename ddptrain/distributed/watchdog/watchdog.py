"""A thread that handles signals and the time limit, and detects hangs.

The main thread marks its progress. Python runs signal handlers in the main thread only, which may be waiting
in a collective, so signals are handled in this thread.
"""

import contextlib
import logging
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from ddptrain.api.world import World
from ddptrain.distributed.watchdog.flight_recorder import collectives
from ddptrain.distributed.watchdog.hang_report import Beat, describe, describe_cut, guilty, stack_of, waits
from ddptrain.distributed.watchdog.heartbeat import Failure, Heartbeat, is_suspended, started_at
from ddptrain.errors import ExitCode
from ddptrain.text import SAVED, last_words

log = logging.getLogger("ddptrain")

LONG_S = 3600.0
"""The limit for what may take long, even on one rank: downloading, compiling the first step, saving."""
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
_ECHO_S = 1.0
"""A signal repeated within this time is the same request: a scheduler signals the ranks and their agent, and
the agent forwards it."""
_LAST_WORDS_S = 3.0
"""Time for the main thread to notice another rank's failure, and for that rank's message to be printed
first."""
_SUSPENDED_S = 2.0
"""By so much the thread wakes up too late where the process was stopped meanwhile."""
_SOON = 3
"""Intervals in which ranks that stand still for the same reason all become overdue, and say so."""


class Watchdog:
    """The watchdog of one rank. Without ``watching`` it only stores the last mark.

    hang_timeout: seconds without a mark on any rank that end the job with exit code 76; None: never.
    """

    def __init__(self, world: World, hang_timeout: float | None = None) -> None:
        self._world = world
        self._timeout = hang_timeout
        self._usual = LONG_S if hang_timeout is None else hang_timeout
        self._known: set[str] = set()
        self._marks, self._step, self._what = 0, 0, "starting"
        self._marked_at, self._patience = time.monotonic(), LONG_S
        self._writes = False
        self._writes_aside: Callable[[], bool] = lambda: False
        self._main = threading.get_ident()
        self._born = started_at(os.getpid())
        interval = max(0.1, min(1.0, (hang_timeout or LONG_S) / 10))
        self._interval = interval
        self._heartbeat = Heartbeat(world, interval, self._beat, self._is_late)
        self._stop: str | None = None
        self._signalled_at: float | None = None
        self._limit_at: float | None = None
        self._grace = 0.0
        self._handlers: dict[int, Any] = {}
        """The previous signal handlers."""
        self._saved = False
        self._wakeup: tuple[socket.socket, socket.socket] | None = None
        """(read, write): a byte for each signal, while the thread runs."""
        self._wakeup_before = -1
        """The program's own descriptor."""
        self._over = threading.Event()

    @property
    def stop(self) -> str | None:
        """What requested a stop, on any rank; None if nothing has."""
        return self._stop

    @property
    def place(self) -> str:
        """The last mark: ``step 7, backward``."""
        return f"step {self._step}, {self._what}"

    def mark(
        self, what: str, step: int | None = None, patience: float | None = None, writes: bool = False
    ) -> None:
        """The main thread begins ``what``, in this step (None: the same as before).

        patience: seconds allowed until the next mark; None: ``hang_timeout``, or longer the first time, which
        may start workers, connect or compile. writes: a checkpoint, which the next attempt needs: until the
        next mark this process is not ended because another rank is gone.
        """
        if patience is None:
            patience = self._usual if what in self._known else LONG_S
            self._known.add(what)
        if step is not None:
            self._step = step
        self._marks, self._what, self._writes = self._marks + 1, what, writes
        self._marked_at, self._patience = time.monotonic(), max(patience, self._usual)

    def spare_while(self, writes: Callable[[], bool]) -> None:
        """While ``writes()``, called from the watchdog's thread, is true, this process is not ended because
        another rank is gone: a thread of it is writing a checkpoint."""
        self._writes_aside = writes

    def forget_what_is_usual(self) -> None:
        """Everything is done for the first time again: another graph is compiled."""
        self._known.clear()

    def stop_on_signals(self, grace: float, time_limit: float | None) -> None:
        """From now on SIGTERM, SIGUSR1, SIGINT, SIGHUP (the terminal is closed) and the time limit (seconds)
        request a stop. To be called in the main thread.

        grace: seconds from a signal until the process is ended without saving.
        """
        self._grace = grace
        self._limit_at = None if time_limit is None else time.monotonic() + time_limit
        assert self._wakeup is not None, "signals are heard while watching only"
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup[1].fileno(), warn_on_full_buffer=False)
        for number in _SIGNALS:  # the thread reads the signal from the descriptor
            if signal.getsignal(number) is signal.SIG_IGN and number == signal.SIGHUP:  # of nohup
                continue
            self._handlers[number] = signal.signal(number, lambda *_: None)
        os.register_at_fork(after_in_child=self._forget_signals)  # a child's signals are its own

    def saved(self) -> None:
        """The state is saved: the process may be ended at any time now."""
        self._saved = True

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """The thread runs inside."""
        self._heartbeat.start()
        self._wakeup = reader, writer = socket.socketpair()
        writer.setblocking(False)
        thread = threading.Thread(target=self._watch, args=[reader], name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._heartbeat.end()
            self._forget_signals()
            with contextlib.suppress(BlockingIOError):  # full of signals, which wake the thread too
                writer.send(b"\0")
            thread.join()
            reader.close()
            writer.close()

    def failed(self, code: int, said: str) -> None:
        """Tell the other ranks that this one fails with an exit code, and prints this message."""
        self._heartbeat.tell_failure(code, f"rank {self._world.rank}: {said}", shown=False)

    def failure_elsewhere(self, wait: float) -> Failure | None:
        """The failure of another rank; waits so many seconds for it."""
        return self._heartbeat.failure_elsewhere(wait)

    def gone(self) -> str:
        """A message if another rank's process on this host has ended; else ''."""
        beat = self._heartbeat.gone()
        who = "" if beat is None else f"rank {beat.rank} (pid {beat.pid} on {beat.host})"
        return who and f"rank {self._world.rank}: another rank is gone: {who}."

    def _watch(self, reader: socket.socket) -> None:
        try:
            self._listen(reader)
        except Exception:  # without this thread the process would ignore signals
            self._exit(ExitCode.CRASH, traceback.format_exc())

    def _listen(self, reader: socket.socket) -> None:
        reader.settimeout(self._interval)  # select() is limited to file descriptors below 1,024
        while True:
            began = time.monotonic()
            with contextlib.suppress(TimeoutError):
                for number in reader.recv(64):
                    self._hear(number)
            if (late := time.monotonic() - began - self._interval) > _SUSPENDED_S:
                self._forgive(late)
            if self._over.is_set():
                return
            self._check_limits_and_peers()
            if self._timeout is not None and (self._overdue() or self._heartbeat.cut_off(self._timeout)):
                self._judge()

    def _forgive(self, seconds: float) -> None:
        """This process was stopped for so long, as by Ctrl-Z or a scheduler: nothing hangs for that."""
        self._marked_at = min(time.monotonic(), self._marked_at + seconds)
        self._heartbeat.forgive(seconds)

    def _hear(self, number: int) -> None:
        if number not in _SIGNALS:
            return
        now, name = time.monotonic(), signal.Signals(number).name
        if self._signalled_at is None:
            self._signalled_at = now
            self.ask_to_stop(name)
        elif now - self._signalled_at > _ECHO_S:
            if self._saved:
                self._exit_saved(f"before {name} came again")
            self._exit(128 + number, f"{name} again: stopped at once, without saving.")

    def _check_limits_and_peers(self) -> None:
        now, heartbeat = time.monotonic(), self._heartbeat
        if self._limit_at is not None and now > self._limit_at:
            self._limit_at = None
            self.ask_to_stop("train.time_limit")
        if self._stop is None:
            self._stop = heartbeat.stop
        if self._signalled_at is not None and now > self._signalled_at + self._grace:
            if self._saved:
                self._exit_saved(f"within checkpoint.grace={self._grace:g} s after {self._stop}")
            missed = "the checkpoint was not written" if self._writes else "no step ended"
            self._exit(
                128 + signal.SIGTERM,
                f"{missed} within checkpoint.grace={self._grace:g} s after {self._stop}: ended without"
                " saving. Started again, the run goes on from its last checkpoint, if it has one.",
            )
        self._check_lost_ranks()

    def _exit_saved(self, when: str) -> None:
        said = f"{SAVED}; figures or trackers were not done {when}. Start it again."
        self._exit(ExitCode.STOPPED, said if self._world.is_first else "")

    def _check_lost_ranks(self) -> None:
        """End this process if another rank has failed or its process is gone; not while it writes."""
        if self._writes or self._writes_aside():
            return
        gone = self.gone()
        if not gone and self._heartbeat.failure is None:
            return
        # the main thread gets an error from its next gloo collective; one of NCCL's would wait for ever
        self._over.wait(_LAST_WORDS_S)
        if self._writes or self._writes_aside():  # it may have begun meanwhile
            return
        failure = self._heartbeat.failure
        if failure is not None and failure.rank != self._world.rank:
            self._exit(failure.code, failure.said, failure.shown)
        if failure is None:
            if self._world.size > self._world.local_size:  # ranks on this host notice it themselves
                self._heartbeat.tell_failure(ExitCode.CRASH, gone, shown=True)
            self._exit(ExitCode.CRASH, gone)

    def ask_to_stop(self, who: str) -> None:
        """All ranks save and stop after a step that they agree on. who: what asks for it, for the log."""
        if self._stop is None:
            self._stop = who
            self._heartbeat.ask_to_stop(who)
            if self._heartbeat.failure is None and not self.gone():
                # else it is torchrun, ending the rest of a failed job
                when = (
                    "all is saved, figures are left" if self._saved else "after this step, with a checkpoint"
                )
                _say_in_thread(lambda: log.info("stop       asked for by %s: %s", who, when))

    def _overdue(self) -> bool:
        return time.monotonic() - self._marked_at > self._patience

    def _is_late(self) -> bool:
        """Whether to ask for the other ranks' heartbeats."""
        return time.monotonic() - self._marked_at > self._patience / 2

    def _beat(self, number: int, tells_all: bool = False) -> Beat:
        """tells_all: where it waits, even if it is not overdue."""
        overdue = self._overdue()
        looks = overdue or tells_all
        frames = stack_of(self._main) if looks else traceback.StackSummary()
        begun, pending = collectives() if looks and self._world.device.type == "cuda" else ({}, None)
        return Beat(
            self._world.rank, number, self._marks, self._step, self._what, overdue,
            socket.gethostname(), os.getpid(), self._born, "".join(frames.format()[-8:]),
            waits([(entry.filename, entry.name) for entry in frames]), begun, pending,
        )  # fmt: skip

    def _judge(self) -> None:
        """This rank is overdue or has lost contact. If all ranks are, report which one the others wait
        for."""
        timeout, host = self._timeout or LONG_S, socket.gethostname()
        if time.monotonic() - self._marked_at < timeout:
            return  # the contact alone is lost, and it may come back
        contact_is_lost = self._heartbeat.unanswered
        if contact_is_lost and is_suspended(os.getppid()):
            return  # Ctrl-Z reaches the launcher alone, and the store is in it: it answers later
        others = [beat for beat, _ in dict(self._heartbeat.heard).values()]
        silent = [beat for beat in others if self._heartbeat.silent(beat.rank)]
        beats = [self._beat(0, tells_all=True), *others]
        keeper = next((beat for beat in others if beat.rank == 0), None)
        away = self._heartbeat.unanswered and keeper is not None and keeper.host not in ("", host)
        # ranks that can report it: those that have contact, and without the store those of one host
        speakers = [beat for beat in beats if beat not in silent and not (away and beat.host != host)]
        # a little later than a rank falls silent: by then the others are overdue, and tell where they wait
        known = self._heartbeat.unanswered or self._heartbeat.cut_off(timeout + _SOON * self._interval)
        stands_still = all(beat.overdue or beat in silent or known for beat in beats)
        if len(beats) < self._world.size or not stands_still:
            return
        if self._world.rank != min(beat.rank for beat in speakers):
            # the first rank that answers reports it
            if contact_is_lost and not self._over.wait(2 * _LAST_WORDS_S) and self._heartbeat.unanswered:
                self._exit(ExitCode.HUNG, "")
            return
        if (
            self._over.is_set()
            or self._heartbeat.failure_elsewhere(wait=1.0)
            or (contact_is_lost and not self._heartbeat.unanswered)
            or self._marks != beats[0].marks
        ):
            return  # it continues, or another rank has reported it
        if away:
            message = describe_cut(host, beats, timeout)
        else:
            message = describe(guilty(beats, silent), beats, silent, timeout)
        said = f"rank {self._world.rank} on {host}: {message}"
        self._heartbeat.tell_failure(ExitCode.HUNG, said, shown=True)
        if self._world.is_first and self._world.size > self._world.local_size:
            self._over.wait(2 * self._interval)  # for other hosts to read it from the store in this process
        for beat in silent:  # last: torchrun blames the first rank that ends
            # machines may have one name, and containers the same ids
            if beat.rank in self._world.neighbours and started_at(beat.pid) == beat.born:
                with contextlib.suppress(OSError):
                    os.kill(beat.pid, signal.SIGKILL)  # a stopped process handles no other signal
        self._exit(ExitCode.HUNG, message)

    def _exit(self, code: int, message: str, shown: bool = True) -> None:
        if self._over.is_set():
            return  # the main thread has finished meanwhile
        if message:
            _say_in_thread(lambda: last_words(message, shown))
        os._exit(code)

    def _forget_signals(self) -> None:
        if self._handlers:
            signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


def _say_in_thread(say: Callable[[], None]) -> None:
    """Print or log in a thread, for at most a second: the reader of the pipe may be gone or blocked."""

    def attempt() -> None:
        with contextlib.suppress(OSError, ValueError):
            say()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(timeout=1.0)
