"""Processes beside the training, which draw and send."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}


def start_module(module: str, words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """``python -m module words``, which hears none of the signals that are for the rank, not even while it
    starts; the rank misses none. It has to end when its pipe from the rank is closed. options: Popen's; one
    that is to outlive a kill of the rank's process group gets its own, but no session of its own, in which
    its nice value would count for nothing beside the rank (sched(7), "The autogroup feature")."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)  # of this thread; the child inherits it
    try:
        return subprocess.Popen([sys.executable, "-m", module, *words], **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
