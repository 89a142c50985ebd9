"""A training that `bench` measures: it tells where its time goes, and waits for its turn."""

import json
import socket
from collections.abc import Mapping
from typing import Any, final

from ddptrain.api.controller import Controller
from ddptrain.api.observer import Evaluated, Log, RunInfo, Start
from ddptrain.distributed.device import peak_memory

_GONE = "the bench that started this training is gone"


@final
class Pacing(Controller):
    """At each log step reports its times, and waits for the signal to go on; ends when the bench is gone.
    address: of the bench's socket.

    On each rank: ranks that waited for the first in a collective would keep their GPUs busy beside another
    training's.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._bench = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._run = RunInfo()

    def start(self, event: Start) -> None:
        self._run = event.run
        try:
            self._bench.connect(self._address)
        except OSError as error:
            raise SystemExit(_GONE) from error

    def goes_on(self, event: Evaluated) -> bool:
        return True

    def log(self, event: Log) -> None:
        # log lines here are waits for other trainings' turns
        seconds = {**event.timing.seconds, "logging": 0.0}
        world, setup = self._run.world, _setup(self._run)
        memory = peak_memory(world.device)
        said = {"rank": world.rank, "seconds": seconds, "setup": setup, "peak_memory": memory}
        try:
            self._bench.sendall(json.dumps(said).encode() + b"\n")
            goes_on = self._bench.recv(1)
        except OSError:
            goes_on = b""
        if not goes_on:
            raise SystemExit(_GONE)


def _setup(run: RunInfo) -> Mapping[str, Any]:
    return {
        "device": run.world.device.type,
        "ranks": run.world.size,
        "precision": run.precision,
        "convolves": run.convolves,
        "fused": run.fused,
        "workers": run.loading.workers,
        "resident": run.loading.resident,
        "gradient_bytes": run.gradient_bytes,
    }
