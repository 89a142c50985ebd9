"""Attempts on other nodes, as their sweep sees them."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ddptrain.tools.sweep.attempt_file import AttemptFile
from ddptrain.tools.sweep.ledger import Job
from ddptrain.tools.sweep.machines import OUTPUT
from ddptrain.tools.sweep.remote import RemoteAttempt, Scheduler


class Silent(Scheduler):
    def submit(self, name: str, words: Sequence[str], log: Path) -> None:
        pass

    def names(self) -> set[str] | None:
        return None

    def cancel(self, name: str) -> None:
        pass


@pytest.mark.parametrize("ahead", [-7200.0, 7200.0])
def test_seconds_are_of_one_clock(ahead: float, tmp_path: Path) -> None:
    """Where the node's clock shows another time than the sweep's, no job takes hours, or less than none."""
    began = time.time() + ahead
    job = Job(0, "key", (), attempt=1)
    attempt, file = RemoteAttempt(job, tmp_path, Silent(), ["x"]), AttemptFile(tmp_path, 1)
    attempt.look()
    assert attempt.seconds == 0.0
    file.claim({"began": began, "node": "node-a"})
    attempt.look()
    assert 0.0 <= attempt.seconds < 60.0
    assert RemoteAttempt(job, tmp_path, Silent()).seconds >= 0.0, "adopted by another sweep process"
    file.rewrite({"began": began, "node": "node-a", "ended": began + 90.0, "code": 0})
    attempt.look()
    assert attempt.seconds == pytest.approx(90.0)


def test_a_job_that_a_scheduler_stops_before_it_has_begun_is_stopped(tmp_path: Path) -> None:
    """Not failed: it dies of the signal until it listens to it."""
    words = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]
    line = [sys.executable, "-m", "ddptrain.tools.sweep.node_job", str(tmp_path), "1", *words]
    process = subprocess.Popen(line)
    output = tmp_path / OUTPUT
    while not output.exists() or not output.read_bytes():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 75
    assert AttemptFile(tmp_path, 1).read()["code"] == 75
