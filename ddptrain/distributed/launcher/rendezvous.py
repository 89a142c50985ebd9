"""What the agent on this host knows of the other hosts of its job: who is there, and whether it reaches the
place where all meet (torchrun's rendezvous)."""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ddptrain.errors import ExitCode

LAST_WORD_S = 10.0
"""Beyond ``hang_timeout``, before the agent ends a host that is cut off: its ranks get to report first."""
_GONE_S = 3.0
"""A host that restarts its ranks is on no list for a moment."""
_TRY_S = 2.0
_SUSPENDED_S = 3.0
"""A second's sleep that takes longer: the process was stopped meanwhile, as by Ctrl-Z."""


class Rendezvous:
    """Of this host with the others. handler: torchrun's, of the c10d kind; another (static) knows nothing."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._met: dict[Any, int] = {}
        self._missed: dict[Any, float] = {}

    @property
    def _state(self) -> Any:
        """Who takes part, who waits: torchrun's own, at most a second old while ranks run."""
        return getattr(getattr(self._handler, "_state_holder", None), "state", None)

    @property
    def elastic(self) -> bool:
        """Whether the job goes on with fewer hosts, and takes more."""
        settings = getattr(self._handler, "settings", None)
        return settings is not None and settings.min_nodes < settings.max_nodes

    def met(self) -> list[str]:
        """The addresses of those that have met now, by their numbers."""
        self._met = dict(self._state.participants) if self._state is not None else {}
        self._missed = {}
        return [node.addr for node, _ in sorted(self._met.items(), key=lambda item: item[1])]

    def look(self) -> None:
        """Note who is missing. To be called every second or so."""
        state, now = self._state, time.monotonic()
        if state is not None:
            there = {*state.participants, *state.wait_list}
            self._missed = {node: self._missed.get(node, now) for node in self._met if node not in there}

    def lost(self) -> list[str]:
        """The addresses of hosts that torchrun has heard nothing of (15 s by default)."""
        now = time.monotonic()
        return [node.addr for node, since in self._missed.items() if now - since > _GONE_S]

    def others_wait(self) -> bool:
        """Whether a host waits to join, or has left this round already to begin the next."""
        for _ in range(3):  # what is known may be a second old
            if self._handler.num_nodes_waiting():
                return True
            time.sleep(0.5)
        return False


def end_if_cut_off(endpoint: str, patience: float, end_ranks: Callable[[], None]) -> None:
    """Watch, from a thread, that this host reaches the rendezvous; where it has not for ``patience`` seconds,
    end the ranks and this process with exit code 76.

    The agent itself asks the rendezvous every second, and for an answer from a host that is gone it would
    wait for a quarter of an hour, and meanwhile notice neither signals nor the end of its ranks.
    """
    host, port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
    with contextlib.suppress(OSError):  # once: without a network names take long
        host = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])

    def watch() -> None:
        reached = time.monotonic()
        while time.monotonic() - reached < patience:
            with contextlib.suppress(OSError):
                socket.create_connection((host, port), timeout=_TRY_S).close()
                reached = time.monotonic()
            before = time.monotonic()
            time.sleep(1.0)
            reached += max(0.0, time.monotonic() - before - _SUSPENDED_S)  # this process was stopped
        print(
            f"ddptrain launch: {socket.gethostname()} has not reached the rendezvous at {endpoint} for"
            f" {patience:g} s: that host or the link to it is gone, and with it all others of the job. What"
            f" runs here is ended; exit code {ExitCode.HUNG:d}. Start the same line again when it is back.",
            file=sys.stderr,
            flush=True,
        )
        end_ranks()
        os._exit(ExitCode.HUNG)

    threading.Thread(target=watch, name="rendezvous watch", daemon=True).start()
