"""Controllers end or pause a run depending on its progress: pruning, early stopping."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from ddptrain.api.observer import Evaluated, Log, Start


class Controller(ABC):
    """Made on every rank from ``controllers.<name>`` of the config. Unlike an observer it may end the run; so
    do its exceptions."""

    why = "ended by a controller"
    """For the log, when it ends a run: ``<why> at step 120``."""
    completes = False
    """Whether a run that it ends counts as done (exit code 0) or stopped (75)."""

    @abstractmethod
    def goes_on(self, event: Evaluated) -> bool:
        """After each evaluation, on rank 0; all ranks follow its answer. False: all ranks save and end."""

    def start(self, event: Start) -> None:  # noqa: B027
        """Before the first step, on every rank."""

    def log(self, event: Log) -> None:  # noqa: B027
        """At each log step, on every rank, while the training waits."""

    def state_dict(self) -> Mapping[str, Any]:
        """Tensors and plain values, on rank 0, for checkpoints."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned at this step, on every rank."""
        assert not state, "a controller that has a state has to implement load_state_dict"
