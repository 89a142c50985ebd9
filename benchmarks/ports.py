"""A step of the scripts in docs/examples: the plain loop, and its port to ``ddptrain.fit``, on the CPU.

    python benchmarks/ports.py                     # a Markdown table on stdout, in some ten minutes
    python benchmarks/ports.py --write docs/fit.md    # and into that file
    python benchmarks/ports.py --examples digits --rounds 3

Both scripts of an example are executed as they are, in turns, in one process, and a ratio is taken within one
round. A step lasts from one call of the loss to the next, and the median of a script's last steps counts: no
set-up, no evaluation, no log.
"""

import argparse
import gc
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import THREADS, made_with, publish, rounds_parser

NAME = "ports"
"""Of the markers."""
EXAMPLES = Path(__file__).parents[1] / "docs/examples"
NAMES = sorted(path.name.removesuffix("_plain.py") for path in EXAMPLES.glob("*_plain.py"))
LAST = 80
"""Steps that count."""
_MARK = "TURNS"


def main() -> None:
    parser = rounds_parser(__doc__, NAME, 20)
    parser.add_argument("--examples", default=",".join(NAMES), help="(%(default)s)")
    parser.add_argument("--turns", metavar="EXAMPLE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.turns:
        print(_MARK, json.dumps(take_turns(arguments.turns, arguments.rounds)))
        return
    lines = [
        "| example | plain loop | `ddptrain.fit`, beside it: median | least | most |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in arguments.examples.split(","):
        rounds = by_itself(name, arguments.rounds)
        ratios = [port / plain for plain, port in rounds]
        print(name, [round(ratio, 3) for ratio in ratios], file=sys.stderr, flush=True)
        milliseconds = 1000 * statistics.median(plain for plain, _ in rounds)
        share = f"**{statistics.median(ratios):.3f}** | {min(ratios):.3f} | {max(ratios):.3f}"
        lines.append(f"| {name} | {milliseconds:.2f} ms | {share} |")
    lines += ["", f"{arguments.rounds} rounds in which both take turns, {THREADS} threads."]
    lines[-1] += f" {made_with('torch', 'ddptrain')} Made by `python benchmarks/ports.py`."
    publish("\n".join(lines), NAME, arguments.write)


def by_itself(name: str, rounds: int) -> list[tuple[float, float]]:
    """The turns of one example in a process of their own: torchrun's, so that `fit` trains in it."""
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            [*(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"),
             *(__file__, "--turns", name, "--rounds", str(rounds))],
            cwd=folder, env={**os.environ, "OMP_NUM_THREADS": str(THREADS)}, capture_output=True, text=True,
        )  # fmt: skip
    answers = [line for line in ended.stdout.splitlines() if line.startswith(_MARK)]
    if ended.returncode or not answers:
        raise SystemExit(f"{name}: {ended.stdout}{ended.stderr}")
    return [(plain, port) for plain, port in json.loads(answers[0].removeprefix(_MARK))]


def take_turns(name: str, rounds: int) -> list[tuple[float, float]]:
    """Seconds of a step, plain and by `fit`, of each round."""
    from torch.nn import functional

    begins: list[float] = []
    for loss in ("cross_entropy", "mse_loss"):
        setattr(functional, loss, noted(getattr(functional, loss), begins))
    results = []
    for number in range(rounds + 1):
        seconds = {}
        for kind in ("plain", "fit") if number % 2 else ("fit", "plain"):
            begins.clear()
            gc.collect()  # so that none pays for what the other one left
            runpy.run_path(str(EXAMPLES / f"{name}_{kind}.py"), run_name="__main__")
            last = begins[-LAST:]
            seconds[kind] = statistics.median(after - before for before, after in pairwise(last))
        results.append((seconds["plain"], seconds["fit"]))
    return results[1:]  # in the first round caches are filled


def noted(loss: Callable[..., Any], begins: list[float]) -> Callable[..., Any]:
    """A loss function of torch that writes down when a training step calls it."""
    import torch

    def function(*words: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            begins.append(time.perf_counter())
        return loss(*words, **named)

    return function


if __name__ == "__main__":
    main()
