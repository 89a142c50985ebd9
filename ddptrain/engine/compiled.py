"""torch.compile: what it made, and where that is kept for the next run."""

import logging
import os
from pathlib import Path
from typing import Any, final

from torch import nn
from torch._logging._internal import set_logs

from ddptrain.observe.observer import End, Evaluated, Log, Observer, Saved, Start

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
log = logging.getLogger("ddptrain")


def compile_model(model: nn.Module, mode: str) -> None:
    """In place, so that names in checkpoints stay clean; it happens in the first forward pass.

    What is made is kept in ``~/.cache/ddptrain/compiled`` (``XDG_CACHE_HOME``, ``TORCHINDUCTOR_CACHE_DIR``),
    where torch by itself would lose it with the machine's temporary files.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ddptrain" / "compiled"
    if not os.environ.get(_FOLDER):
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("%s: can't be made (%s), so the next run compiles again", cache, error.strerror)
        else:
            os.environ[_FOLDER] = str(cache)
    log.info("compiling  before the first step; it may take minutes the first time (%s)", mode)
    model.compile(mode=mode)


@final
class Compilations(Observer):
    """Says how many graphs were compiled, how long that took, and why it was done again."""

    def __init__(self) -> None:
        set_logs(recompiles=True)  # torch names the tensor and its sizes each time
        self._told = 0

    def start(self, event: Start) -> None:
        self._tell("training")

    def log(self, event: Log) -> None:
        pass

    def evaluated(self, event: Evaluated) -> None:
        self._tell("evaluation, and batches of other sizes")

    def saved(self, event: Saved) -> None:
        pass

    def end(self, event: End) -> None:
        self._tell("batches of other sizes")

    def _tell(self, what_for: str) -> None:
        graphs, seconds = _so_far()
        if graphs > self._told:
            log.info(
                "compiled   %d graph%s for %s; %.1f s so far; kept in %s",
                graphs - self._told,
                "s" * (graphs - self._told > 1),
                what_for,
                seconds,
                os.environ.get(_FOLDER, "a temporary folder"),
            )
        self._told = graphs


def _so_far() -> tuple[int, float]:
    """Graphs of this process, and the seconds spent on them."""
    from torch._dynamo import utils

    stats: Any = utils.counters["stats"]
    return stats["unique_graphs"], utils.calculate_time_spent().get("total_wall_time", 0.0)
