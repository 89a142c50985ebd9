"""What is printed, and a reader that has seen enough of it."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shell import ddptrain

from ddptrain import __version__
from ddptrain.errors import ExitCode
from ddptrain.text import say
from ddptrain.verbs import main as main_module


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


@pytest.mark.parametrize(("local_rank", "waits"), [("0", 30.0), ("1", 35.0)])
def test_a_rank_that_alone_is_refused_says_so_in_the_end(
    local_rank: str, waits: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On another node than rank 0's, where a folder is missing. Rank 0 would have ended all of them."""
    slept: list[float] = []
    monkeypatch.setattr(main_module.time, "sleep", slept.append)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert main_module.main(["--config-dir=nowhere", "recipe=cnn_digits"]) == ExitCode.USER_ERROR
    assert "nowhere: there is no such folder" in capsys.readouterr().err
    assert slept == [waits]
