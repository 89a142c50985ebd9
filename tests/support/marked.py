"""Processes that are found by a mark in their environment, which all that a job starts inherits."""

import time
from pathlib import Path
from typing import NamedTuple

MARK = "DDPTRAIN_TEST_JOB"


class Marked(NamedTuple):
    command: str
    variables: dict[str, str]
    """Its environment, as it was started."""


def marked(mark: str) -> dict[int, Marked]:
    """By process id; zombies don't count."""
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_text(errors="replace").split("\0")
            variables = dict(item.split("=", 1) for item in environ if "=" in item)
            if variables.get(MARK) != mark:
                continue
            if (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                command = (folder / "cmdline").read_text(errors="replace").replace("\0", " ")
                processes[int(folder.name)] = Marked(command, variables)
        except OSError:  # it has ended meanwhile
            continue
    return processes


def living(mark: str) -> dict[int, str]:
    """The command lines of all that live."""
    return {pid: its.command for pid, its in marked(mark).items()}


def left_after(mark: str, seconds: float) -> dict[int, str]:
    """The command lines of what still lives after so long, at most."""
    deadline = time.monotonic() + seconds
    while (left := living(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def parent(pid: int) -> int:
    """0 where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def name(pid: int) -> str:
    """'' where it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
