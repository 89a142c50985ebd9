"""A training that `bench` measures: it tells where its time goes, and waits for its turn."""

import json
import os
import socket
from collections.abc import Mapping
from typing import Any, final

from ddptrain.api.observer import End, Evaluated, Log, Observer, Saved, Start
from ddptrain.observe.advice import Setup
from ddptrain.observe.turns import TURNS

_GONE = "the bench that started this training is gone"


def is_paced() -> bool:
    return TURNS in os.environ


@final
class Pace(Observer):
    """At each log step says how it went, and trains on when it is told to; ends where nobody is left to tell
    it.

    Each rank has one: ranks that waited for the first in a collective would keep their GPUs busy beside
    another contestant's.
    """

    at_once = True

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def start(self, event: Start) -> None:
        self._bench = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._bench.connect(os.environ[TURNS])
        except OSError as error:
            raise SystemExit(_GONE) from error

    def log(self, event: Log) -> None:
        # log lines here are waits for other contestants' turns
        seconds = {**event.timing.seconds, "logging": 0.0}
        said = {"rank": self._setup.world.rank, "seconds": seconds, "setup": _told(self._setup)}
        try:
            self._bench.sendall(json.dumps(said).encode() + b"\n")
            goes_on = self._bench.recv(1)
        except OSError:
            goes_on = b""
        if not goes_on:
            raise SystemExit(_GONE)

    def evaluated(self, event: Evaluated) -> None:
        pass

    def saved(self, event: Saved) -> None:
        pass

    def end(self, event: End) -> None:
        self._bench.close()


def _told(setup: Setup) -> Mapping[str, Any]:
    return {
        "device": setup.world.device.type,
        "ranks": setup.world.size,
        "precision": setup.precision,
        "convolves": setup.convolves,
        "fused": setup.fused,
        "workers": setup.loading.workers,
        "resident": setup.loading.resident,
        "gradient_bytes": setup.gradient_bytes,
        "steps_per_epoch": setup.steps_per_epoch,
    }
