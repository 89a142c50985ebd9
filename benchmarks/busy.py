"""Seconds of a training step on the CPU beside busy neighbours: processes that compute all the time.

    python benchmarks/busy.py                                  # a Markdown table, in some 30 minutes
    python benchmarks/busy.py --write docs/performance.md      # and into that file
    python benchmarks/busy.py --spins 300000,0 --rounds 3      # how long threads spin at a barrier

Each cell is the median over the rounds; every round runs each case with each setting beside each number of
neighbours, each in a process of its own. A step's seconds are those of the run's own time split, without
logging, evaluation and checkpoints.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from common import made_with, publish, rounds_parser

NAME = "busy"
"""Of the markers."""
CASES = {
    "`lstm_text`, 1 rank of 2 threads": ("recipe=lstm_text", 1, 8),
    "`cnn_cifar10`, 1 rank of 2 threads": ("recipe=cnn_cifar10 data=shapes", 1, 25),
    "`cnn_cifar10`, 2 gloo ranks": ("recipe=cnn_cifar10 data=shapes", 2, 25),
}
"""What is trained, on how many ranks, for how many steps."""
GNU = 300_000
"""What GNU's OpenMP takes where nobody says anything: about 3 ms."""
_STEP = ("data", "copy", "forward", "backward", "all_reduce", "optimizer")


def main() -> None:
    parser = rounds_parser(__doc__, NAME, 5)
    parser.add_argument("--neighbours", default="0,1,2", help="numbers of them (%(default)s)")
    parser.add_argument("--spins", default=f"{GNU},ours", help="values of GOMP_SPINCOUNT (%(default)s)")
    arguments = parser.parse_args()
    spins, numbers = arguments.spins.split(","), [int(k) for k in arguments.neighbours.split(",")]
    seconds: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for turn in range(arguments.rounds):
        for name, (recipe, ranks, steps) in CASES.items():
            for k in numbers:
                for spin in spins if turn % 2 == 0 else spins[::-1]:
                    with busy(k), tempfile.TemporaryDirectory() as folder:
                        took = step_seconds(recipe.split(), ranks, steps, spin, Path(folder))
                    print(f"{name}, {k} neighbours, spin {spin}: {took:.4f} s", file=sys.stderr, flush=True)
                    seconds[name, spin, k].append(took)
    head = "".join(f" beside {k} |" for k in numbers)
    lines = [f"| milliseconds a step | `GOMP_SPINCOUNT` |{head}", f"|---|---|{'---:|' * len(numbers)}"]
    for name in CASES:
        for spin in spins:
            cells = "".join(_cell(seconds[name, spin, k], seconds[name, spin, numbers[0]]) for k in numbers)
            lines.append(f"| {name} | {spin} |{cells}")
    note = f"Medians of {arguments.rounds} rounds, and times the first column; {made_with('torch')}"
    publish("\n".join([*lines, "", note]), NAME, arguments.write)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that compute all the time."""
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


def step_seconds(recipe: Sequence[str], ranks: int, steps: int, spin: str, folder: Path) -> float:
    """Of a run's steps, the mean. spin: ours: what ddptrain chooses."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if spin != "ours":
        environment["GOMP_SPINCOUNT"] = spin
    launch = ["launch", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    words = [*recipe, "device=cpu", f"train.steps={steps}", f"run.dir={folder}/run", "log.every=1000"]
    words += [f"checkpoint.every={steps}", f"train.eval_every={steps}", "observers=[]"]
    done = subprocess.run(
        [sys.executable, "-m", "ddptrain", *launch, *words], env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"{recipe}: stopped:\n{done.stderr}")
    time: dict[str, float] = json.loads((folder / "run" / "summary.json").read_text())["time"]
    return sum(time[part] for part in _STEP) / steps


def _cell(measured: Sequence[float], idle: Sequence[float]) -> str:
    median = statistics.median(measured)
    return f" {1000 * median:.1f} ({median / statistics.median(idle):.2f}) |"


if __name__ == "__main__":
    main()
