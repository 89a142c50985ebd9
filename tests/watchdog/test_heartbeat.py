"""A rank whose process has ended is missed, and only such a one."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from ddptrain.api.world import World
from ddptrain.distributed.watchdog.hang_report import Beat
from ddptrain.distributed.watchdog.heartbeat import Heartbeat, started_at

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are told apart by /proc")


@pytest.fixture
def peer() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def heartbeat(pid: int, born: str, ranks_here: int = 2) -> Heartbeat:
    """Of rank 0, which has heard of a rank 1 with this process."""
    beat = Beat(1, 1, 1, 3, "forward", overdue=False, host="here", pid=pid, born=born)
    found = Heartbeat(World(0, 2, 0, ranks_here), 1.0, lambda number: beat, lambda: False)
    found.hear(beat)
    return found


def test_it_is_missed_once_it_has_ended_though_nobody_has_waited_for_it(
    peer: "subprocess.Popen[bytes]",
) -> None:
    own = heartbeat(peer.pid, started_at(peer.pid))
    assert own.gone() is None
    peer.kill()
    while started_at(peer.pid):
        pass
    assert peer.returncode is None
    gone = own.gone()
    assert gone is not None
    assert (gone.rank, gone.pid) == (1, peer.pid)


def test_a_process_never_seen_here_is_not_missed(peer: "subprocess.Popen[bytes]") -> None:
    """Another container's numbers: there is no such process here, or it is somebody else's."""
    born = started_at(peer.pid)
    assert heartbeat(peer.pid, born + "1").gone() is None
    peer.kill()
    peer.wait()
    assert heartbeat(peer.pid, born).gone() is None
    assert heartbeat(0, "").gone() is None


def test_a_number_that_was_given_out_again_does_not_hide_its_end(peer: "subprocess.Popen[bytes]") -> None:
    own = heartbeat(peer.pid, started_at(peer.pid))
    assert own.gone() is None
    beat, _ = own.heard[1]
    own.hear(beat._replace(born="1"))  # as if this process were older than what runs there now
    assert own.gone() is not None


def test_another_nodes_ranks_are_not_looked_for_here(peer: "subprocess.Popen[bytes]") -> None:
    own = heartbeat(peer.pid, started_at(peer.pid), ranks_here=1)
    peer.kill()
    peer.wait()
    assert own.gone() is None
