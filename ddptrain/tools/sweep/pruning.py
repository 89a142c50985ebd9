"""The controller by which a job asks its sweep whether to go on."""

import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import final

from ddptrain.api.controller import Controller
from ddptrain.api.observer import Evaluated, Start
from ddptrain.tools.sweep.pruning_requests import ANSWERS, REQUESTS, append, read_from

_ANSWER_TIMEOUT_S = 60.0
"""For an answer: the sweep looks up ten times a second, or twice where its jobs run on other nodes."""
_LOOK_S = 0.05
log = logging.getLogger("ddptrain")


@final
class Pruning(Controller):
    """Asks the sweep that started this job whether it goes on after an evaluation, by files in the job's
    ``folder``. waits: for the answer, which else is yes. metrics: that ``sweep.objectives`` names.

    Without an answer within a minute the job goes on, and waits no more until that answer is there: on other
    nodes it may outlive its sweep, which judges it once it is back.
    """

    why = "pruned"

    def __init__(self, folder: str, waits: bool = True, metrics: Sequence[str] = ()) -> None:
        self._folder = Path(folder)
        self._waits = waits
        self._metrics = metrics
        self._unanswered: int | None = None
        """The request that was waited for in vain."""

    def start(self, event: Start) -> None:
        for name in self._metrics:
            event.check_metric("sweep.objectives", name)

    def goes_on(self, event: Evaluated) -> bool:
        request = {
            "step": event.step,
            "steps": event.steps,
            "metric": event.metric,
            "value": event.value if math.isfinite(event.value) else None,  # JSON has no such numbers
            "higher_is_better": bool(event.higher_is_better),
        }
        number = append(self._folder / REQUESTS, request)
        away = self._unanswered is not None and not read_from(self._folder / ANSWERS, self._unanswered)
        if not self._waits or away:
            return True
        until = time.monotonic() + _ANSWER_TIMEOUT_S
        while time.monotonic() < until:
            if answers := read_from(self._folder / ANSWERS, number):
                return bool(answers[0]["goes_on"])
            time.sleep(_LOOK_S)
        self._unanswered = number
        log.warning("pruning    the sweep has not answered for %.0f s; this job goes on", _ANSWER_TIMEOUT_S)
        return True
