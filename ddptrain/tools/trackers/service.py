"""What a tracker has to do; one subclass each."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddptrain.tools.trackers.about import About

Line = Mapping[str, Any]
"""Of metrics.jsonl."""


class Service(ABC):
    """A tracker's side of one run, which to make one begins there, or goes on with. That and every method may
    raise whatever the tracker's library does; another one is then made later."""

    known: Mapping[str, int] | None
    """The last step that the tracker has, by split; None where it can't be asked."""

    def __init__(self, about: About) -> None:
        self.about = about

    @abstractmethod
    def log(self, lines: Sequence[Line]) -> None:
        """Send these lines."""

    @abstractmethod
    def send_plots(self, plots: Sequence[Path]) -> None:
        """Send pictures and texts, in the place of earlier ones of their names."""

    @abstractmethod
    def send_files(self, files: Sequence[Path], checkpoint: Path | None) -> None:
        """Send files that describe the run, and a checkpoint's folder."""

    @abstractmethod
    def close(self, outcome: str) -> None:
        """The training has ended, so, or without saying how ('')."""


def is_installed(library: str) -> bool:
    """And not just a folder of its name in the current one, as W&B makes."""
    spec = find_spec(library)
    return spec is not None and spec.origin is not None


def values_of(line: Line) -> dict[str, float]:
    """The numbers of a line, as ``train/loss``; what was not finite is left out."""
    return {
        f"{line['split']}/{name}": value
        for name, value in line.items()
        if name not in ("step", "split") and value is not None
    }
