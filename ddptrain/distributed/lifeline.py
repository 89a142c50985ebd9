"""Processes that end with the one that started them, however that one ends.

A killed torchrun leaves its ranks training, and a killed rank leaves its loader's workers waiting.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import forkserver, resource_tracker

AGENT = "DDPTRAIN_AGENT"
"""Environment variable: the process id of the ``launch`` that starts this rank."""
_PR_SET_PDEATHSIG = 1
_FOR_THE_RANK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals by which a job is stopped. They go to a rank's whole process group; the rank decides."""


def end_with_agent() -> None:
    """End this rank, if it is one, when the agent that started it ends.

    To be called early, while the agent still lives: of an agent that died before, only ``launch``'s is known.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.environ.pop(AGENT, None))  # not for what this rank starts


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


def end_with_rank(_worker: int) -> None:
    """End this worker when the rank that asked for it ends; a DataLoader's ``worker_init_fn``.

    The kernel would only watch its parent, the forkserver, which lives as long as any worker does.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None

    def follow() -> None:
        rank.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="lifeline", daemon=True).start()


def start_forkserver() -> None:
    """Start multiprocessing's forkserver, which with its workers hears none of the signals that are for the
    rank; the rank misses none."""
    # one by one: the first, which the second would start too, lifts a part of the mask when it is done
    for start in (resource_tracker.ensure_running, forkserver.ensure_running):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_RANK)
        try:
            start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
