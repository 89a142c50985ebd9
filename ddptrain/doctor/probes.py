"""Gathers the facts: every question by itself, all at once, none for longer than its time."""

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddptrain.doctor import children, machine
from ddptrain.doctor.facts import Facts, ProbeFailure, Settings

TORCHRUN_PORT = 29500
"""Where plain torchrun with several nodes meets by itself."""
_DRIVER_S, _TORCH_S, _STEP_S = 45.0, 120.0, 60.0
_ALL_S = 1200.0
"""The driver mostly answers in a tenth of a second, but wakes eight GPUs one after the other; torch may come
over a slow file system; a first all-reduce takes some seconds."""


@dataclass(frozen=True)
class Probe:
    """A question, and how long it may take."""

    name: str
    ask: Callable[[], Mapping[str, Any]]
    """Returns fields of Facts. What it raises becomes a fact too."""
    seconds: float = 10.0


def probes(settings: Settings) -> list[Probe]:
    """All of doctor's. With device=cpu no driver is asked."""
    all_probes = [
        Probe(
            "torch",
            lambda: children.ask("ask_torch", "torch", _TORCH_S, settings.device, then_s=_STEP_S),
            _ALL_S,
        ),
        Probe("torchvision", lambda: children.ask("ask_torchvision", "torchvision", _TORCH_S), 2 * _TORCH_S),
        Probe("limits", lambda: {"limits": machine.limits()}),
        *still(),
    ]
    if settings.port is not None or not settings.under_torchrun:  # whose own port is taken by itself
        number = TORCHRUN_PORT if settings.port is None else settings.port
        all_probes.append(Probe("port", lambda: {"port": machine.port(number)}))
    return all_probes if settings.device == "cpu" else [*all_probes, *of_the_driver()]


def still() -> list[Probe]:
    """What files and variables tell, in no time."""
    return [
        Probe("environment", lambda: {"environment": machine.environment()}),
        Probe("system", lambda: {"system": machine.system()}),
    ]


def of_the_driver() -> list[Probe]:
    return [
        Probe("nvml", lambda: children.ask("ask_nvml", "nvml", _DRIVER_S), 2 * _DRIVER_S),
        Probe("cuda", lambda: children.ask("ask_cuda", "cuda", _DRIVER_S), 2 * _DRIVER_S),
    ]


def collect(settings: Settings, probes: Sequence[Probe]) -> Facts:
    """Ask all of them at the same time."""
    answers: queue.SimpleQueue[tuple[str, Mapping[str, Any]]] = queue.SimpleQueue()
    began = time.monotonic()
    for probe in probes:
        # a daemon: one that hangs must not keep the process
        threading.Thread(target=_answer, args=(probe, answers), name=probe.name, daemon=True).start()
    open_ones = {probe.name: probe.seconds for probe in probes}
    sections: dict[str, Any] = {}
    failures: list[ProbeFailure] = []
    while open_ones:
        name = min(open_ones, key=lambda name: open_ones[name])
        try:
            name, answer = answers.get(timeout=max(0.0, began + open_ones[name] - time.monotonic()))
        except queue.Empty:
            answer = {"failures": (ProbeFailure(name, f"no answer in {open_ones[name]:g} s", hung=True),)}
        if open_ones.pop(name, None) is not None:
            failures += answer.get("failures", ())
            sections.update({key: value for key, value in answer.items() if key != "failures"})
    return dataclasses.replace(Facts(settings), **sections, failures=tuple(failures))


def _answer(probe: Probe, answers: "queue.SimpleQueue[tuple[str, Mapping[str, Any]]]") -> None:
    try:
        answers.put((probe.name, probe.ask()))
    except Exception as error:  # whatever it is: doctor goes on, and says so
        answers.put(
            (probe.name, {"failures": (ProbeFailure(probe.name, f"{type(error).__name__}: {error}"),)})
        )
