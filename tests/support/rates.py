"""An observer that keeps the learning rate of every step."""

from typing import Any

from ddptrain.api.observer import Log, Observer


class Rates(Observer):
    """Needs ``log_every=1``."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def start(self, event: Any) -> None: ...
    def log(self, event: Log) -> None:
        self.seen.append(event.values["lr"])

    def evaluated(self, event: Any) -> None: ...
    def saved(self, event: Any) -> None: ...
    def end(self, event: Any) -> None: ...
