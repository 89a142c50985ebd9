"""How processes start and end: each ends with the one that started it, however that one ends.

Without this a killed torchrun leaves its ranks training, and a killed rank leaves its loader's
workers waiting.
"""

import atexit
import ctypes
import gc
import io
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from typing import NoReturn

AGENT = "DDPTRAIN_AGENT"
"""Environment variable: the process id of the ``launch`` that starts this rank, or of the sweep that starts
this job."""
OBJECTS = "DDPTRAIN_OBJECTS"
"""Environment variable: a file with a program's sys.path and the objects given to ``ddptrain.fit``, pickled
by this user's own program."""
_OF_RANKS = re.compile(r"PET_|TORCHELASTIC_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$")
_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
STOP_SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
"""Signals by which a job is stopped. They may go to the launcher's or a rank's whole process group; the rank
decides."""


def environment_of_no_rank() -> dict[str, str]:
    """This process's variables without what a scheduler or torchrun says to its ranks."""
    return {name: value for name, value in os.environ.items() if not _OF_RANKS.match(name)}


def end_with_agent() -> None:
    """End this process, if it is a rank or a sweep's job, when the agent or the sweep that started it ends.

    To be called early. Whether plain torchrun's agent died before, its store tells: it serves the ranks from
    before they start until it ends.
    """
    if (agent := os.environ.pop(AGENT, None)) is not None:  # not for what this rank starts
        end_with_parent(agent)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(None)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            try:
                socket.create_connection(store, timeout=1).close()
            except ConnectionRefusedError:
                os.kill(os.getpid(), signal.SIGKILL)
            except OSError:
                pass  # who can't be asked is not known to be dead


def end_with_parent(parent: str | None) -> None:
    """Have the kernel kill this process when the thread that started it ends (on Linux; elsewhere nothing).

    ``parent`` is the process id of the one that started it, where that is known.
    """
    if sys.platform != "linux":
        return
    expected = os.getppid() if parent is None else int(parent)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != expected:  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


def end_as_by_ctrl_c() -> None:
    """SIGTERM and a closed terminal end this process as Ctrl-C does; under nohup the terminal does not."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


@contextmanager
def adopting() -> Iterator[None]:
    """Inside, a process whose parent ends becomes a child of this one if it descends from it. On Linux."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:  # what a rank leaves behind is init's to wait for
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


@contextmanager
def gc_paused() -> Iterator[None]:
    """For imports alone: they make thousands of objects, and none of them is garbage. Inside nothing is
    collected, which makes importing torch a fifth faster. What is there at the end is never looked at again,
    so that later collections have less to do."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def end_with(main: Callable[[Sequence[str]], int], words: Sequence[str]) -> NoReturn:
    """Run a command line, and end this process with its exit code."""
    atexit.register(_before_shutdown)  # the first, and so called after all others
    try:
        code = main(words)
    except SystemExit as end:  # of a recipe's own
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and code is not end.code:
            print(end.code, file=sys.stderr)
    except Exception:  # a bug: its traceback, as Python itself would print it
        sys.excepthook(*sys.exc_info())
        code = 1
    leave(code)


def leave(code: int) -> NoReturn:
    """End this process with an exit code; a rank and its ``launch`` without the interpreter's own shutdown.
    What a user's code has not flushed is in its files all the same.

    A thread of gloo's may still hold the last collective's tensors. Where it lets go of them while the
    interpreter shuts down, it asks for a lock that is gone, and aborts the process (torch 2.15, seen on busy
    machines: SIGABRT, "terminate called without an active exception"). So may the thread by which torchrun's
    agent keeps its place in the rendezvous: after a signal it is left running.
    """
    if "RANK" not in os.environ and AGENT not in os.environ:
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    _flush_files()
    os._exit(code)


def _flush_files() -> None:
    """All but what `gc_paused` has frozen, such as the standard streams."""
    for held in gc.get_objects():
        if issubclass(type(held), _WRITERS):
            with suppress(OSError, ValueError):  # closed, detached, or nobody reads it
                held.flush()


def _before_shutdown() -> None:
    """Python's own shutdown looks at all objects several times, which takes a second after an import of
    torch: nothing is left for it to look at."""
    _flush_files()
    gc.freeze()


def end_with_rank(_worker: int) -> None:
    """End this worker when the rank that asked for it ends; a DataLoader's ``worker_init_fn``.

    The kernel would only watch its parent, the forkserver, which lives as long as any worker does.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None

    def follow() -> None:
        rank.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="parent-death", daemon=True).start()


def start_forkserver() -> None:
    """Start multiprocessing's forkserver, which with its workers hears none of the signals that are for the
    rank; the rank misses none."""
    # one by one: the first, which the second would start too, lifts a part of the mask when it is done
    for start in (resource_tracker.ensure_running, forkserver.ensure_running):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
