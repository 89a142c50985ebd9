"""What is printed, and a reader that has seen enough of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from shell import ddptrain

from ddptrain import __version__


def test_the_version_is_ddptrains(tmp_path: Path) -> None:
    assert ddptrain(tmp_path, "--version").out == f"ddptrain {__version__}\n"


@pytest.mark.parametrize("words", ["doctor device=cpu workers=0", "--help"])
def test_a_reader_that_ends_early_makes_no_traceback(words: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "ddptrain", *words.split()], cwd=tmp_path, stdout=writer,
        stderr=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    os.close(writer)
    assert done.returncode == 141, done.stderr
    assert "Error" not in done.stderr
