"""A rank that ends right after a collective, on a busy core, ends with its own exit code."""

import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from shell import ddptrain
from sweeps import SWEPT

from ddptrain.errors import ExitCode
from ddptrain.tools.sweep.pruning_requests import PruningRequests

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
RUNS, AT_ONCE = 45, 3


def test_a_run_that_is_pruned_at_once_never_aborts(tmp_path: Path) -> None:
    """Before ranks left without Python's own shutdown, 5 of 45 died of SIGABRT: see `process.leave`."""
    asking = [PruningRequests(tmp_path / str(run)) for run in range(RUNS)]
    over = threading.Event()

    def answer() -> None:
        while not over.wait(0.1):
            for questions in asking:
                for _ in questions.unanswered():
                    questions.answer(goes_on=False)

    def one(run: int) -> int:
        folder = tmp_path / str(run)
        words = f"launch --nproc-per-node=2 --config-dir={SWEPT} recipe=swept device=cpu run.dir=run"
        return ddptrain(folder, f"{words} {asking[run].controller(True, ())}", OMP_NUM_THREADS="1").code

    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    answering = threading.Thread(target=answer)
    answering.start()
    try:
        with ThreadPoolExecutor(AT_ONCE) as several:
            codes = Counter(several.map(one, range(RUNS)))
    finally:
        os.sched_setaffinity(0, mine)
        over.set()
        answering.join()
    assert codes == {ExitCode.STOPPED: RUNS}
