"""Command lines, started as a user starts them, and how they are refused."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from warm import run_warm

_TIMEOUT_S = 600
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Ended:
    """How a command line ended."""

    code: int
    out: str
    err: str


def ddptrain(cwd: Path, arguments: str | Sequence[str], **variables: str) -> Ended:
    """In a fork of a process that has imported torch, but where it starts ranks, or where a variable is one
    that Python reads when it starts."""
    words = _words(arguments)
    if words[:1] == ["launch"] or any(name.startswith("PYTHON") for name in variables):
        return in_new_process(cwd, arguments, **variables)
    return Ended(*run_warm(cwd, words, _environment(variables), _TIMEOUT_S))


def in_new_process(cwd: Path, arguments: str | Sequence[str], **variables: str) -> Ended:
    ended = subprocess.run(
        [sys.executable, "-m", "ddptrain", *_words(arguments)],
        cwd=cwd,
        env=_environment(variables),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def under_torchrun(cwd: Path, ranks: int, words: str) -> Ended:
    """words: a script or a module (-m), and its arguments."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    ended = subprocess.run(
        [sys.executable, *launcher, *words.split()],
        cwd=cwd,
        env=_environment({}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def _words(arguments: str | Sequence[str]) -> list[str]:
    return arguments.split() if isinstance(arguments, str) else list(arguments)


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    return {**inherited, "no_proxy": "*", **variables}


def with_imports(cwd: Path, arguments: str | Sequence[str], **variables: str) -> tuple[Ended, set[str]]:
    """And the modules that it has imported, by Python's own list, which no busy machine disturbs."""
    ended = ddptrain(cwd, arguments, **{**variables, "PYTHONPROFILEIMPORTTIME": "1"})
    lines = ended.err.splitlines(keepends=True)
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "ddptrain" in imported
    return replace(
        ended, err="".join(line for line in lines if not line.startswith("import time:"))
    ), imported


def without_torch(cwd: Path, arguments: str | Sequence[str], **variables: str) -> Ended:
    """Of a command that answers at once: it does without torch."""
    ended, imported = with_imports(cwd, arguments, **variables)
    assert "torch" not in imported
    return ended


def refusal(cwd: Path, arguments: str | Sequence[str], **variables: str) -> str:
    """The one message with which a command line is refused."""
    ended = ddptrain(cwd, arguments, **variables)
    assert "Traceback" not in ended.err, ended.err
    assert ended.code == 2, ended
    messages = re.split(r"^ddptrain: ", ended.err, flags=re.MULTILINE)[1:]
    assert len(messages) == 1, ended.err
    return messages[0]


def early_refusal(cwd: Path, arguments: str | Sequence[str], **variables: str) -> str:
    """A refusal before anything else is said and anything is written."""
    before = sorted(cwd.iterdir())
    ended = without_torch(cwd, arguments, **variables)
    assert ended.err.startswith("ddptrain: "), ended.err
    assert ended.err.count("ddptrain: ") == 1, ended.err
    assert ended.code == 2
    assert ended.out == ""
    assert "Traceback" not in ended.err
    assert sorted(cwd.iterdir()) == before
    return ended.err.removeprefix("ddptrain: ")
