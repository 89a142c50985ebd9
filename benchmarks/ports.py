"""A step of the scripts in docs/examples: the plain loop, and its port to ``ddptrain.fit``, on the CPU.

    python benchmarks/ports.py                     # a Markdown table on stdout, in some 25 minutes
    python benchmarks/ports.py --write docs/fit.md    # and into that file
    python benchmarks/ports.py --examples digits --rounds 3

Each script is started as it is, in a process of its own; both take turns, and a ratio is taken within one
round. A step lasts from one call of the loss to the next, and the median of a script's last steps counts: no
set-up, no evaluation, no log.
"""

import argparse
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import THREADS, check_markers, made_with, publish

NAME = "ports"
"""Of the markers."""
EXAMPLES = Path(__file__).parents[1] / "docs/examples"
NAMES = sorted(path.name.removesuffix("_plain.py") for path in EXAMPLES.glob("*_plain.py"))
LAST = 80
"""Steps that count."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="(%(default)s)")
    parser.add_argument("--examples", default=",".join(NAMES), help="(%(default)s)")
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--time", type=Path, metavar="SCRIPT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.time:
        print("STEP", timed(arguments.time))
        return
    if arguments.write:
        check_markers(arguments.write, NAME)
    lines = [
        "| example | plain loop | `ddptrain.fit`, beside it: median | least | most |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in arguments.examples.split(","):
        plain, ratios = [], []
        for number in range(arguments.rounds):
            kinds = ["plain", "fit"] if number % 2 else ["fit", "plain"]
            seconds = {kind: started(EXAMPLES / f"{name}_{kind}.py") for kind in kinds}
            plain.append(seconds["plain"])
            ratios.append(seconds["fit"] / seconds["plain"])
        print(name, [round(ratio, 3) for ratio in ratios], file=sys.stderr, flush=True)
        share = f"**{statistics.median(ratios):.3f}** | {min(ratios):.3f} | {max(ratios):.3f}"
        lines.append(f"| {name} | {1000 * statistics.median(plain):.2f} ms | {share} |")
    lines += ["", f"{arguments.rounds} rounds in which both take turns, {THREADS} threads."]
    lines[-1] += f" {made_with('torch', 'ddptrain')} Made by `python benchmarks/ports.py`."
    publish("\n".join(lines), NAME, arguments.write)


def started(script: Path) -> float:
    """Seconds of a step of a script, run by itself. Under torchrun, so that `fit` trains in the process that
    has the loss."""
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            [*(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"),
             *(__file__, "--time", str(script))],
            cwd=folder, env={**os.environ, "OMP_NUM_THREADS": str(THREADS)}, capture_output=True, text=True,
        )  # fmt: skip
    words = [line.split() for line in ended.stdout.splitlines() if line.startswith("STEP")]
    if ended.returncode or not words:
        raise SystemExit(f"{script}: {ended.stdout}{ended.stderr}")
    return float(words[0][1])


def timed(script: Path) -> float:
    """Run a script; seconds of a step, from one call of torch's loss function to the next."""
    import torch
    from torch.nn import functional

    begins: list[float] = []

    def noting(loss: Any) -> Any:
        def noted(*words: Any, **named: Any) -> Any:
            if torch.is_grad_enabled():
                begins.append(time.perf_counter())
            return loss(*words, **named)

        return noted

    for name in ("cross_entropy", "mse_loss"):
        setattr(functional, name, noting(getattr(functional, name)))
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")
    return statistics.median(b - a for a, b in zip(begins[-LAST:], begins[1 - LAST :], strict=False))


if __name__ == "__main__":
    main()
