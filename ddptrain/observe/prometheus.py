"""What a run is doing now, on the first rank, at an address that Prometheus scrapes."""

import errno
import importlib.util
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, final
from wsgiref.simple_server import WSGIServer

from ddptrain.api.observer import Devices, End, Evaluated, Log, Observer, RunInfo, Saved, Start
from ddptrain.distributed.world import world_from_environment
from ddptrain.errors import UserError

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger("ddptrain")

_PORTS = 100
"""How many are tried where the first one is taken."""
_READINGS = {
    "utilisation": ("utilisation_ratio", 0.01),
    "cpu": ("cpu_ratio", 0.01),
    "memory_gib": ("memory_bytes", 2.0**30),
    "process_gib": ("process_memory_bytes", 2.0**30),
    "power_w": ("power_watts", 1.0),
    "temperature_c": ("temperature_celsius", 1.0),
    "clock_mhz": ("clock_hertz", 1e6),
    "throttled": ("throttled", 1.0),
}
"""The monitor's names, and Prometheus' with the factor to its base units
(https://prometheus.io/docs/practices/naming/)."""
_LABELS = {"gpu": "gpu", "host": "node"}


@final
class Prometheus(Observer):
    """Serves ``http://<address>:<port>/metrics`` from the first step to the end of the process.

    port: or the next free one of a hundred; 0: any. Values are those of the last log step and evaluation;
    times and readings are up to date at each scrape. Raises UserError without prometheus-client.
    """

    def __init__(self, address: str = "127.0.0.1", port: int = 9464) -> None:
        if not 0 <= port <= 65535:
            raise UserError(f"observers.prometheus.port={port}: must be 0 to 65535.")
        if world_from_environment().is_first and importlib.util.find_spec("prometheus_client") is None:
            raise UserError(
                "observers=prometheus: needs prometheus-client: pip install 'ddptrain[prometheus]'."
            )
        self._address, self._port = address, port
        self._run = RunInfo()
        self._log: Log | None = None
        self._evaluated: Evaluated | None = None
        self._saved: tuple[int, float] | None = None
        """Step and time."""
        self._server: tuple[WSGIServer, threading.Thread] | None = None

    def start(self, event: Start) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._run = event.run
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        ports = range(self._port, min(self._port + _PORTS, 65536)) if self._port else [0]
        for port in ports:
            try:
                self._server = start_http_server(port, self._address, registry)
                break
            except OSError as error:
                if port == ports[-1] or not _is_taken(error):
                    raise
        assert self._server is not None
        log.info("prometheus http://%s:%d/metrics", self._address, self._server[0].server_port)

    def log(self, event: Log) -> None:
        self._log = event

    def evaluated(self, event: Evaluated) -> None:
        self._evaluated = event

    def saved(self, event: Saved) -> None:
        # by the disk's clock: one written in the background is told of at a later log step
        age = time.time() - (event.path / "manifest.json").stat().st_mtime
        self._saved = event.step, time.monotonic() - max(age, 0.0)

    def end(self, event: End) -> None:
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()

    def collect(self) -> Iterable["Metric"]:
        """For prometheus-client, in its thread, at each scrape."""
        run = self._run
        families = _Families(run.folder.name)
        facts = {
            "recipe": str(run.config.get("recipe")), "host": socket.gethostname(), "precision": run.precision,
            "world_size": str(run.world.size), "folder": str(run.folder.resolve()),
        }  # fmt: skip
        families.gauge("run_info", "What is run, and where. Always 1.", 1, facts)
        families.gauge("steps", "Optimizer steps of the whole run.", run.steps)
        restarts = float(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        families.counter("restarts", "Restarts by torchrun or the launcher.", restarts)
        if (logged := self._log) is not None:
            families.gauge("step", "Optimizer steps done at the last log step.", logged.step)
            families.gauge("epoch", "Epochs done at the last log step.", logged.epoch)
            families.counter("samples", "Training samples at the last log step.", logged.samples)
            speed = logged.timing.samples_per_s
            families.gauge("samples_per_second", "Of all ranks, between the last two log steps.", speed)
            if (mfu := logged.timing.mfu) is not None:
                families.gauge("flop_utilisation_ratio", "The model's FLOP/s beside the peak.", mfu)
            for name, value in logged.values.items():
                families.gauge("train", "A value of the last log step.", value, {"name": name})
        if (evaluated := self._evaluated) is not None:
            for name, value in evaluated.metrics.items():
                families.gauge("valid", "A metric of the last evaluation.", value, {"name": name})
        if self._saved is not None:
            step, at = self._saved
            families.gauge("checkpoint_step", "Step of the last checkpoint of this process.", step)
            age = time.monotonic() - at
            families.gauge("checkpoint_age_seconds", "Time since that checkpoint was written.", age)
        for rank, timing in sorted(run.devices.timings().items()):
            for phase, seconds in timing.seconds.items():
                labels = {"rank": str(rank), "phase": phase}
                families.counter("phase_seconds", "Time of a rank by phase.", seconds, labels)
        for name, value, labels in _readings(run.devices):
            families.gauge(name, "A reading of the last second.", value, labels)
        return families.all()


class _Families:
    """Metrics by name; samples of one name come together, as the format demands."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._families: dict[str, Metric] = {}

    def gauge(self, name: str, about: str, value: float, labels: Mapping[str, str] = {}) -> None:
        self._add("gauge", name, about, "", value, labels)

    def counter(self, name: str, about: str, value: float, labels: Mapping[str, str] = {}) -> None:
        self._add("counter", name, about, "_total", value, labels)

    def all(self) -> list["Metric"]:
        return list(self._families.values())

    def _add(
        self, kind: str, name: str, about: str, suffix: str, value: float, labels: Mapping[str, str]
    ) -> None:
        from prometheus_client import Metric

        name = f"ddptrain_{name}"
        family = self._families.setdefault(name, Metric(name, about, kind))
        family.add_sample(name + suffix, {"run": self._run, **labels}, value)


def _readings(devices: Devices) -> Iterator[tuple[str, float, dict[str, str]]]:
    """Name, value and labels of each."""
    for path, value in devices.latest().items():
        label, _, reading = path.partition("/")
        kind = label.rstrip("0123456789")
        if reading in _READINGS and kind in _LABELS:
            name, factor = _READINGS[reading]
            yield f"{kind}_{name}", value * factor, {_LABELS[kind]: label[len(kind) :]}


def _is_taken(error: OSError) -> bool:
    return error.errno in (errno.EADDRINUSE, errno.EACCES)
