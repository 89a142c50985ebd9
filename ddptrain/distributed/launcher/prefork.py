"""Ranks forked from one process that has imported torch once, in place of one interpreter for each.

A rank starts in milliseconds instead of seconds, and shares the memory of all that was imported.
"""

import gc
import importlib
import io
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from ddptrain.distributed.launcher.process import STOP_SIGNALS, adopting, end_with, end_with_parent, gc_paused

Main = Callable[[Sequence[str]], int]
"""Runs a command line and gives its exit code."""

_IN_ANY_TRAINING = (
    "ddptrain.run.train",
    "torch.fx.experimental.symbolic_shapes",  # by backward()
    "torch.utils.tensorboard",
)
_LOOK_EVERY_S = 0.001
_WAIT_EVERY_S = 0.01


class _Order(NamedTuple):
    """A rank to start: its command line, and files for what it prints (None: where the launcher prints)."""

    words: Sequence[str]
    environment: Mapping[str, str]
    stdout: str | None
    stderr: str | None


def prefork_for(main: Main, targets: Sequence[str], compiles: bool) -> "Prefork | None":
    """One that has imported what a training needs: torch, and the modules of these targets that are ours.
    None where ranks are not forked: without Linux, and where PYTHON_EXEC names what is to start them."""
    if sys.platform != "linux" or "PYTHON_EXEC" in os.environ:
        return None
    ours = [name.rpartition(".")[0] for name in targets if name.startswith("ddptrain.")]  # others: CUDA
    compiler = ["torch._dynamo"] if compiles else []
    return Prefork(main, [*_IN_ANY_TRAINING, *compiler, *ours])


class Prefork:
    """A process that has imported torch and ``modules``, and forks a rank at each order. On Linux.

    It is forked when this is made, so that must come before the first thread and before CUDA is touched: it
    inherits both. It ends with this process, at the latest. main: what a rank runs.
    """

    def __init__(self, main: Main, modules: Sequence[str]) -> None:
        self._orders, orders = multiprocessing.Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where a scheduler ignores it, no exit code is kept
        launcher = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            self._orders.close()
            try:
                _serve(orders, launcher, main, modules)
            finally:  # nothing may unwind into what the launcher was about to do
                os._exit(1)
        orders.close()

    def start(self, order: _Order) -> "_Rank":
        """Raises RuntimeError where no rank can be forked."""
        try:
            with adopting():
                self._orders.send(order)
                answer = self._orders.recv()  # the first one comes when all is imported
        except (EOFError, OSError) as error:
            raise RuntimeError("the process that forks the ranks is gone") from error
        if not isinstance(answer, int):
            raise RuntimeError(f"no rank could be forked: {answer}")
        return _Rank(answer)

    @contextmanager
    def starting(self, program: Sequence[str]) -> Iterator[None]:
        """Inside, torchrun's agent gets forked ranks wherever it would start ``program``: its first words,
        which the ranks' own follow."""
        make = vars(api)["get_subprocess_handler"]

        def forked(entrypoint: str, args: tuple[Any, ...], *rest: Any, **named: Any) -> SubprocessHandler:
            words = (entrypoint, *(str(word) for word in args))
            assert words[: len(program)] == tuple(program)
            return _Handler(self, len(program), entrypoint, args, *rest, **named)

        vars(api)["get_subprocess_handler"] = forked
        try:
            yield
        finally:
            vars(api)["get_subprocess_handler"] = make

    def close(self) -> None:
        """End it. Its ranks go on."""
        self._orders.close()
        os.waitpid(self._pid, 0)


class _Handler(SubprocessHandler):
    """torchrun's handle on a rank. skipped: words of the command line before the rank's own."""

    def __init__(self, prefork: Prefork, skipped: int, *arguments: Any, **named: Any) -> None:
        self._prefork = prefork
        self._skipped = skipped
        super().__init__(*arguments, **named)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        stdout, stderr = (None if file is None else file.name for file in (self._stdout, self._stderr))
        return self._prefork.start(_Order(args[self._skipped :], env, stdout, stderr))


class _Rank:
    """As much of a subprocess.Popen as torchrun and its agent ask of one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired after so many seconds."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(_WAIT_EVERY_S)
        return code

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def _serve(orders: Connection, launcher: int, main: Main, modules: Sequence[str]) -> NoReturn:
    """The prefork's own process, to its end."""
    end_with_parent(str(launcher))
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    _name_process("ddptrain-fork")
    with gc_paused():
        for module in modules:
            with suppress(Exception):  # the ranks meet the error again, and can report it
                importlib.import_module(module)
    gc.disable()  # a collection would touch, and so copy, what the ranks share
    while True:
        try:
            order = orders.recv()
        except (EOFError, OSError):  # the launcher has closed it, or ended
            os._exit(0)
        try:
            _fork_twice(orders, order, handlers, main)
        except OSError as error:
            orders.send(str(error))


def _fork_twice(
    orders: Connection, order: _Order, handlers: Mapping[signal.Signals, Any], main: Main
) -> None:
    """Start a rank as an orphan: its launcher adopts it, and so gets its exit code from the kernel."""
    between = os.fork()
    if between != 0:
        os.waitpid(between, 0)
        return
    between = os.getpid()
    try:
        if os.fork() != 0:
            os._exit(0)
    except OSError as error:
        orders.send(str(error))
        os._exit(1)
    os.setsid()  # torchrun sends its signals to the rank's process group
    while os.getppid() == between:
        time.sleep(_LOOK_EVERY_S)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        orders.send(os.getpid())
        orders.close()
        _become_rank(order)
        end_with(main, order.words)
    finally:  # an interrupt must not unwind into what the launcher was about to do
        os._exit(1)


def _become_rank(order: _Order) -> None:
    """As ``python -u -m ddptrain`` would have started it."""
    gc.enable()
    os.environ.clear()
    os.environ.update(order.environment)
    _name_process(f"ddptrain-rank{order.environment['RANK']}")
    for descriptor, path in ((1, order.stdout), (2, order.stderr)):
        if path is not None:
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            os.dup2(file, descriptor)
            os.close(file)
    sys.stdout, sys.stderr = (_unbuffered(stream) for stream in (sys.stdout, sys.stderr))
    sys.argv = [sys.argv[0], *order.words]


def _unbuffered(stream: Any) -> Any:
    raw = io.FileIO(stream.fileno(), "w", closefd=False)
    text: Any = raw  # text over raw bytes is what -u makes, though its type wants a buffer
    return io.TextIOWrapper(
        text, stream.encoding, stream.errors, newline="\n", line_buffering=raw.isatty(), write_through=True
    )


def _name_process(name: str) -> None:
    """What ps and top call it: the command line is the launcher's for all. 15 characters are kept."""
    with suppress(OSError):  # /proc may be read-only, or not there
        Path("/proc/self/comm").write_text(name)
