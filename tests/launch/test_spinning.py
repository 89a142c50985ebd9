"""OpenMP's threads sleep sooner where the machine has other work."""

import subprocess
import sys

import pytest

CHOICE = """
import os, time
from ddptrain.distributed.launcher.spinning import choose_spinning

time.sleep(0.3)
choose_spinning()
print(os.environ.get("GOMP_SPINCOUNT"))
"""


def chosen(**variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CHOICE], capture_output=True, text=True, check=True, timeout=60, env=variables
    )
    return done.stdout.strip()


def test_beside_busy_processes_they_hardly_spin() -> None:
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        assert chosen() == "1000"
        assert chosen(LOCAL_WORLD_SIZE="64") == "20000"  # those are the job's own ranks
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_user_has_set_stays(name: str) -> None:
    assert chosen(**{name: "7"}) == ("7" if name == "GOMP_SPINCOUNT" else "None")
