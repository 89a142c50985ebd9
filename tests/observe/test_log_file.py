"""log.txt on a disk that refuses."""

import subprocess
import sys
from pathlib import Path

FULL = """
import logging, resource, signal, sys
from ddptrain.observe.console import open_log
open_log(sys.argv[1], True)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
for step in range(3):
    logging.getLogger("ddptrain").info("step %d", step)
print("trained")
"""


def test_a_full_disk_below_log_and_stderr_ends_no_training(tmp_path: Path) -> None:
    words = [sys.executable, "-c", FULL, str(tmp_path / "log.txt")]
    with (tmp_path / "stderr").open("w") as stderr:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert (done.returncode, done.stdout) == (0, "trained\n")
