"""What an MLflow tracker costs a training: a server that answers, and one that hangs, beside no tracker.

    python benchmarks/trackers.py --write docs/trackers.md    # some 25 minutes; needs mlflow

The same short training, one after the other in turns. What is compared is the time from the first step to the
last, evaluations, plots and checkpoints included: the run's own `time` in summary.json.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from common import made_with, publish, rounds_parser

NAME = "trackers"
"""Of the markers."""
WORDS = (
    "recipe=cnn_cifar10", "data=shapes", "device=cpu", "data.source.train=4000", "data.source.valid=400",
    "train.batch_size=64", "log.every=5", "train.eval_every=100", "checkpoint.every=200",
)  # fmt: skip
WAYS = ("no tracker", "MLflow", "MLflow's server hangs")


def main() -> None:
    parser = rounds_parser(__doc__, NAME, 4)
    parser.add_argument("--steps", type=int, default=1600, help="(%(default)s)")
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = defaultdict(list)
    weights = set()
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0), backlog=64) as mute:
        home = Path(folder)
        port = _free_port()
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{home}/mlflow.db",
             "--artifacts-destination", str(home / "artifacts"), "--port", str(port), "--workers", "1"],
            cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        ports = {"MLflow": port, "MLflow's server hangs": mute.getsockname()[1]}
        try:
            time.sleep(20)
            for number in range(arguments.rounds + 1):
                for way in (*WAYS[number % 3 :], *WAYS[: number % 3]):
                    run = home / f"{number}-{WAYS.index(way)}"
                    took, bits = trained(run, arguments.steps, ports.get(way))
                    weights.add(bits)
                    if number:  # the first round warms the disk
                        seconds[way].append(took)
                print(f"round {number} of {arguments.rounds}", file=sys.stderr, flush=True)
        finally:
            os.killpg(server.pid, 9)
    assert len(weights) == 1, "the trackers have changed the training"
    base = seconds[WAYS[0]]
    lines = ["| | seconds, median | beside no tracker: median | least, most |", "|---|---:|---:|---:|"]
    for way in WAYS:
        ratios = [own / other for own, other in zip(seconds[way], base, strict=True)]
        spread = f"{min(ratios):.3f}, {max(ratios):.3f}" if way != WAYS[0] else ""
        middle = f"**{statistics.median(ratios):.3f}**" if way != WAYS[0] else "1"
        lines.append(f"| {way} | {statistics.median(seconds[way]):.1f} | {middle} | {spread} |")
    note = (
        f"`cnn_cifar10`, {arguments.steps} steps, {arguments.rounds} rounds in which all take turns; the same"
        f" weights, bit for bit. {made_with('torch', 'mlflow')}"
    )
    publish("\n".join([*lines, "", note]), NAME, arguments.write)


def trained(run: Path, steps: int, port: int | None) -> tuple[float, bytes]:
    """Seconds of the training, and its weights."""
    observers = "[console,jsonl,plots]" if port is None else "[console,jsonl,plots,mlflow]"
    words = [*WORDS, f"train.steps={steps}", f"observers={observers}", f"run.dir={run}"]
    subprocess.run(
        [sys.executable, "-m", "ddptrain", *words], check=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env={**os.environ, "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}"},
    )  # fmt: skip
    summary = json.loads((run / "summary.json").read_text())
    model = torch.load(run / f"checkpoints/step-{steps}/state.pt", weights_only=True)["model"]
    flat = torch.cat([value.double().flatten() for value in model.values()])
    return sum(summary["time"].values()), flat.numpy().tobytes()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


if __name__ == "__main__":
    main()
