"""The thread that hears signals."""

import os
import resource
import signal
import socket
import time

from ddptrain.api.world import World
from ddptrain.distributed.watchdog.watchdog import Watchdog
from ddptrain.testing import run_ranks


def test_a_signal_is_heard_where_more_than_a_thousand_files_are_open() -> None:
    """select() takes none beyond the 1,024th."""

    def rank(world: World) -> str | None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
        opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        watchdog = Watchdog(world)
        with watchdog.watching():
            watchdog.stop_on_signals(grace=30.0, time_limit=None)
            os.kill(os.getpid(), signal.SIGTERM)
            until = time.monotonic() + 20
            while watchdog.stop is None and time.monotonic() < until:
                time.sleep(0.05)
        for file in opened:
            os.close(file)
        return watchdog.stop

    assert run_ranks(rank, 1) == ["SIGTERM"]


def test_a_programs_own_descriptor_hears_signals_again_afterwards() -> None:
    """asyncio's, for one, where a program trains under torchrun."""

    def rank(world: World) -> bool:
        _, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno())
        watchdog = Watchdog(world)
        with watchdog.watching():
            watchdog.stop_on_signals(grace=30.0, time_limit=None)
        return signal.set_wakeup_fd(-1) == writer.fileno()

    assert run_ranks(rank, 1) == [True]
