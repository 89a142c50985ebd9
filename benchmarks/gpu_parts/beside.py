"""The engine beside a hand-written loop on a GPU, eager and compiled: `python beside.py <case> <batch>
<steps> <rounds> <loops> <file>` writes the seconds of a step, round by round. Turns as in throughput.py.

A chunk is timed between two moments in which the host waits for the GPU, at its first timed step and at its
last: kernels run behind the host, so that a clock on the host alone says nothing of a step.
"""

import gc
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from gpu_parts.part import BENCHMARKS, Job, apart, need
from loops import BASE, Run, Watch, by_hand, with_ddptrain
from workloads import Workload, lstm, mobilenet, tiny

from ddptrain.api.world import World

WARMUP = 10
"""Steps of a chunk that are not timed, or as many as are timed where those are fewer."""
ALIKE = {"fp32": 1e-4, "bf16": 3e-2}
"""Relative: how well first losses must agree. In bf16 a sum in another order is another number."""


class Case(NamedTuple):
    title: str
    make: Callable[[World], Workload]
    batch: int
    precision: str
    steps: int
    """Timed ones of a chunk."""


CASES = {
    "tiny": Case("MLP, 26 thousand parameters, fp32", tiny, 64, "fp32", 400),
    "mobilenet": Case("MobileNetV3-small, 32x32, bf16", mobilenet, 512, "bf16", 60),
    "lstm": Case("LSTM, 2 layers of 256, 128 characters, bf16", lstm, 256, "bf16", 60),
}
LOOPS = {
    BASE: (by_hand, "off"),
    "ddptrain": (with_ddptrain, "off"),
    "hand-compiled": (by_hand, "default"),
    "ddptrain-compiled": (with_ddptrain, "default"),
}


@final
class DeviceWatch(Watch):
    """Lets the device come to rest when the first and the last timed step begin."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        warmup = min(WARMUP, steps)
        self._rests = (warmup, warmup + steps)

    def begin(self) -> None:
        if len(self.begins) in self._rests:
            torch.cuda.synchronize()
        super().begin()

    @property
    def total(self) -> int:
        """Steps, with one that ends the last timed one."""
        return self._rests[1] + 1

    @property
    def seconds(self) -> float:
        """Of a step."""
        first, last = self._rests
        return (self.begins[last] - self.begins[first]) / 1e9 / (last - first)


def main(name: str, batch: int, steps: int, rounds: int, loops: Sequence[str], file: Path) -> None:
    case, world = CASES[name], World(device=torch.device("cuda", 0))
    torch.backends.cudnn.benchmark = True  # as the verb train sets it, for both
    workload = case.make(world)
    seconds: dict[str, list[float]] = {loop: [] for loop in loops}
    differences: dict[str, float] = dict.fromkeys(loops, 0.0)
    reference: list[float] = []
    for number in range(rounds + 1):
        for loop in reversed(loops) if number % 2 else loops:
            watch, mode = DeviceWatch(steps), LOOPS[loop][1]
            with tempfile.TemporaryDirectory() as folder:
                total, where = watch.total, Path(folder)
                _chunk(loop, Run(workload, world, batch, total, where, watch, True, case.precision, mode))
            losses = [float(loss) for loss in watch.losses]
            reference = reference or losses
            differences[loop] = max(differences[loop], *apart(losses, reference))
            if number:  # in the first round things are imported and compiled
                seconds[loop].append(watch.seconds)
            file.write_text(json.dumps({"seconds": seconds, "apart": differences}))
        print(f"{name}: round {number} of {rounds}", flush=True)


def _chunk(loop: str, run: Run) -> None:
    gc.collect()
    torch._dynamo.reset()  # each chunk has a model of its own, and a function is compiled 8 times at most
    LOOPS[loop][0](run)
    torch.cuda.synchronize()


def beside(job: Job) -> str:
    """The part: each case in a process of its own."""
    asked = [loop for loop, (_, mode) in LOOPS.items() if mode == "off" or "compiles" not in job.lacks]
    rounds, said = job.pick(7, 2), []
    for name, case in CASES.items():
        if job.small and name == "lstm":
            continue  # without cuDNN each of its 256 cells a pass is a dozen operators
        file = job.folder / f"{name}.json"
        batch, steps = job.pick(case.batch, 8), job.pick(case.steps, 2)
        words = [name, str(batch), str(steps), str(rounds), ",".join(asked), str(file)]
        search = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
        job.run(name, str(Path(__file__)), *words, PYTHONPATH=search)
        measured = json.loads(file.read_text())
        ratios = _ratios(measured["seconds"])
        job.figure(name, {"title": case.title, "batch": batch, "ratios": ratios, **measured})
        said.append(f"{name} {statistics.median(ratios['ddptrain']):.3f}")
        wrong = {loop: off for loop, off in measured["apart"].items() if not off <= ALIKE[case.precision]}
        need(not wrong, f"{name}: first losses differ from the hand-written loop's: {wrong}")
    skipped = "" if len(asked) == len(LOOPS) else f"; not compiled: {job.lacks['compiles']}"
    return f"a step of ddptrain in hand-written ones: {', '.join(said)}{skipped}"


def _ratios(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Round by round, in steps of the eager hand-written loop."""
    pairs: dict[str, Any] = {loop: zip(own, seconds[BASE], strict=True) for loop, own in seconds.items()}
    return {loop: [own / base for own, base in both] for loop, both in pairs.items() if loop != BASE}


if __name__ == "__main__":
    case, *counts, loops, file = sys.argv[1:]
    batch, steps, rounds = map(int, counts)
    main(case, batch, steps, rounds, loops.split(","), Path(file))
