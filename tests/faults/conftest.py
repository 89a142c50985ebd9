"""Runs that nothing happens to, to compare with."""

from pathlib import Path

import pytest
from running import Job


class Undisturbed:
    """Each is done once a session."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._runs: dict[tuple[object, ...], Path] = {}

    def __call__(self, ranks: int, *words: str) -> Path:
        """The run folder of a command line that names it ``run``."""
        key = (ranks, *words)
        if key not in self._runs:
            cwd = self._factory.mktemp("undisturbed")
            job = Job(words, cwd, ranks)  # by the same launcher, which decides the number of threads
            assert job.wait() == 0, job.text[-3000:]
            self._runs[key] = cwd / "run"
        return self._runs[key]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory)
