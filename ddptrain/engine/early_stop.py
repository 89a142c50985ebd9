"""Ends a run that has got where it should, or gets no further."""

import math
from collections.abc import Mapping
from typing import Any, final

from ddptrain.api.controller import Controller
from ddptrain.api.observer import Evaluated, Start, no_such_metric

_LOWER_IS_BETTER = ("loss", "error", "perplexity", "bits")


@final
class EarlyStop(Controller):
    """Ends the run, as done, after ``patience`` evaluations in a row that bring no better value of a metric,
    or as soon as it reaches ``target``.

    metric: of the evaluation; None: the task's ``best_metric``. For another one, lower is better where its
    name holds loss, error, perplexity or bits. Raises UserError where the evaluation has no such metric:
    before the first step, or, for a detail (``AP/cat``), at the first evaluation.
    """

    completes = True

    def __init__(self, patience: int | None, metric: str | None, target: float | None) -> None:
        self._patience = patience
        self._metric = metric
        self._target = target
        self._values: dict[int, float] = {}
        """By step: an evaluation that is repeated after a resume counts once."""
        self._of = ""
        """The metric whose they are."""

    def start(self, event: Start) -> None:
        if self._metric is not None:
            event.check_metric("stop.metric", self._metric)

    def goes_on(self, event: Evaluated) -> bool:
        name = self._metric or event.metric
        if name not in event.metrics:
            raise no_such_metric("stop.metric", name, event.metrics)
        if name != self._of:  # another one since a resume
            self._values, self._of = {}, name
        sign = 1 if self._higher_is_better(name, event) else -1
        self._values[event.step] = event.metrics[name]
        if self._target is not None and sign * (event.metrics[name] - self._target) >= 0:
            self.why = f"{name} {event.metrics[name]:.6g} has reached stop.target={self._target:g},"
            return False
        ranked = [sign * value if math.isfinite(value) else -math.inf for value in self._values.values()]
        since = len(ranked) - 1 - ranked.index(max(ranked))
        self.why = f"{name} has not improved for {since} evaluations (stop.patience),"
        return self._patience is None or since < self._patience

    def state_dict(self) -> Mapping[str, Any]:
        return {"metric": self._of, "values": dict(self._values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values, self._of = dict(state.get("values", {})), state.get("metric", "")

    def _higher_is_better(self, name: str, event: Evaluated) -> bool:
        if name == event.metric:
            return event.higher_is_better
        return not any(part in name for part in _LOWER_IS_BETTER)
