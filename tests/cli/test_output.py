"""What is printed, and a reader that has seen enough of it."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shell import ddptrain

from ddptrain import __version__
from ddptrain.text import say


def test_the_version_is_ddptrains(tmp_path: Path) -> None:
    assert ddptrain(tmp_path, "--version").out == f"ddptrain {__version__}\n"


@pytest.mark.parametrize(
    "words", [pytest.param("doctor device=cpu workers=0", marks=pytest.mark.long), "--help"]
)
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


def test_a_message_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that those of several ranks, on one terminal, keep their ends."""
    writes: list[str] = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stderr", Stream())
    say("ddptrain: rank 1:\nits stack")
    assert writes == ["ddptrain: rank 1:\nits stack\n"]
