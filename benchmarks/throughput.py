"""Samples per second of ddptrain, a hand-written PyTorch loop and other trainers, on the CPU.

    python benchmarks/throughput.py                     # a Markdown table on stdout, in some 40 minutes
    python benchmarks/throughput.py --write docs/performance.md   # and into that file
    python benchmarks/throughput.py --cases tiny,tiny-2-ranks --peers hand,ddptrain --rounds 5
    python benchmarks/throughput.py --cases tiny --peers hand,ddptrain --rounds 12 --at-most 1   # the gate's

All train the same model on the same samples in the same order, with the same optimizer, seed and
threads; where their first losses differ by more than 1e-5 this stops with an error. Each case is a
process (or torchrun's processes) of its own, in which short chunks of all peers take turns, A B C D,
then D C B A. A ratio is taken within one round, so what else the machine does hits both its sides.

A step lasts from one call of the loss to the next: all that a loop does in between, but no set-up,
warm-up or final evaluation.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from bars import draw
from common import Chunk, at_least_one, compare, made_with, publish, silent, table_parser
from loops import BASE, LOG_EVERY, Run, Watch
from peers import PEERS
from workloads import Workload, lstm, mobilenet, mobilenet_as_torchvision_has_it, tiny

from ddptrain.api.world import World
from ddptrain.distributed.comm import close_group, open_group
from ddptrain.distributed.world import world_from_environment

NAME = "throughput"
"""Of the markers."""


@dataclass(frozen=True, slots=True)
class Case:
    """One block of the table. A chunk is ``warmup`` steps, ``steps`` measured ones, and one that ends
    the last of them."""

    title: str
    make: Callable[[World], Workload]
    batch: int
    """Samples of a step on one rank."""
    warmup: int
    steps: int
    window: int
    """Steps after which things come round again; see `_quiet`."""
    rounds: int = 40
    ranks: int = 1
    threads: int = 1
    """Of each rank."""
    peers: Sequence[str] = tuple(PEERS)


_FEW = (BASE, "plain", "ddptrain", "lightning-defaults")
"""Where a step is long, what a loop itself costs is lost in it."""
CASES = {
    "tiny": Case("MLP, 26 thousand parameters", tiny, 64, warmup=50, steps=500, window=LOG_EVERY),
    "tiny-2-ranks": Case("MLP on 2 ranks over gloo", tiny, 64, 50, 300, LOG_EVERY, ranks=2),
    "mobilenet": Case("MobileNetV3-small, 32x32", mobilenet, 128, 1, 3, window=1, peers=_FEW),
    "mobilenet-2-ranks": Case(
        "MobileNetV3-small on 2 ranks", mobilenet, 128, 1, 3, window=1, ranks=2, peers=_FEW
    ),
    "mobilenet-torchvision": Case(
        "torchvision's MobileNetV3-small, 32x32", mobilenet_as_torchvision_has_it, 128, 1, 3, 1, peers=_FEW
    ),
    "lstm": Case("LSTM, 2 layers of 256, 128 characters", lstm, 32, 1, 3, window=1, peers=_FEW),
    "lstm-2-ranks": Case("LSTM on 2 ranks", lstm, 32, 1, 3, window=1, ranks=2, peers=_FEW),
}


def main() -> None:
    arguments = _arguments()
    if arguments.measure:
        measure(CASES[arguments.measure], arguments.peers.split(","), arguments.rounds, arguments.out)
        return
    wanted = arguments.peers.split(",") if arguments.peers else list(PEERS)
    results: dict[str, dict[str, list[Chunk]]] = {}
    for name in arguments.cases.split(","):
        asked = wanted if arguments.peers else CASES[name].peers
        peers = [peer for peer in asked if PEERS[peer].is_installed()]
        results[name] = _in_processes(name, peers, arguments.rounds or CASES[name].rounds)
    publish("\n".join([*_table(results), "", *_notes(results, wanted)]), NAME, arguments.write)
    if arguments.plot:
        speeds = {CASES[name].title: _by_title(chunks) for name, chunks in results.items()}
        draw(speeds, "median and quartiles; " + made_with("torch"), arguments.plot)
    if arguments.at_most is not None:
        _check(results, arguments.at_most)


def measure(case: Case, peers: Sequence[str], rounds: int, out: Path) -> None:
    """Every round of one case, as one of its ranks; rank 0 writes the chunks of each peer to ``out``."""
    world = world_from_environment()
    open_group(world)
    results: dict[str, list[Chunk]] = {name: [] for name in peers}
    with tempfile.TemporaryDirectory() as folder, silent(Path(folder)):
        workload = case.make(world)
        for number in range(rounds + 1):
            for name in reversed(peers) if number % 2 else peers:
                chunk = _chunk(name, case, workload, world, Path(folder) / f"{name}-{number}")
                results[name].append(chunk)
                compare(name, chunk, results[BASE][0])
    close_group()
    if world.is_first:
        # the first round is not counted: in it the peers are imported and caches filled
        out.write_text(
            json.dumps({name: [asdict(c) for c in chunks[1:]] for name, chunks in results.items()})
        )


def _chunk(name: str, case: Case, workload: Workload, world: World, folder: Path) -> Chunk:
    folder.mkdir()
    watch = Watch()
    steps, tuned = case.warmup + case.steps + 1, PEERS[name].tuned
    run = Run(workload, world, case.batch * world.size, steps, folder, watch, tuned)
    gc.collect()  # so that none pays for what another one left
    torch.set_num_threads(case.threads)
    if world.size > 1:
        dist.barrier()
    PEERS[name].train(run)
    if torch.get_num_threads() != case.threads:
        raise SystemExit(f"{name} changed the number of threads to {torch.get_num_threads()}")
    if len(watch.begins) != run.steps:
        raise SystemExit(f"{name} took {len(watch.begins)} steps, not {run.steps}")
    taken = [(stop - start) / 1e9 for start, stop in pairwise(watch.begins[case.warmup :])]
    return Chunk(_quiet(taken, case.window), [float(loss) for loss in watch.losses])


def _quiet(steps: Sequence[float], window: int) -> float:
    """Seconds of a step undisturbed, with its share of what comes once a window (logging).

    Of the steps that stand at the same place in their windows, the 10th percentile; of those, the mean.
    """
    places = [sorted(steps[place::window]) for place in range(window)]
    return statistics.fmean(at_place[len(at_place) // 10] for at_place in places)


def _in_processes(name: str, peers: Sequence[str], rounds: int) -> dict[str, list[Chunk]]:
    """Measure a case in fresh processes, as many as it has ranks."""
    case = CASES[name]
    print(f"{name}: {rounds} rounds of {', '.join(peers)}", file=sys.stderr, flush=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "chunks.json"
        command = [sys.executable, *(launcher if case.ranks > 1 else []), __file__, "--measure", name]
        command += ["--peers", ",".join(peers), "--rounds", str(rounds), "--out", str(out)]
        threads = str(case.threads)  # set before torch starts, or the peers would choose for themselves
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": threads})
        if done.returncode != 0:
            raise SystemExit(f"{name}: stopped, see above")
        return {peer: [Chunk(**c) for c in chunks] for peer, chunks in json.loads(out.read_text()).items()}


Results = Mapping[str, Mapping[str, Sequence[Chunk]]]
"""Of each case, of each peer: its chunks, one a round."""


def _table(results: Results) -> list[str]:
    lines = [
        "| | samples/s | a step, in the tuned hand-written loop's (min to max) | µs more |",
        "|---|---:|---:|---:|",
    ]
    for name, chunks in results.items():
        case = CASES[name]
        lines.append(f"| *{case.title}, batch {case.batch * case.ranks}* | | | |")
        lines += [_row(peer, chunks[peer], chunks[BASE], case) for peer in chunks]
    return lines


def _row(peer: str, chunks: Sequence[Chunk], base: Sequence[Chunk], case: Case) -> str:
    speed = statistics.median(case.batch * case.ranks / chunk.seconds for chunk in chunks)
    if peer == BASE:
        return f"| {PEERS[peer].title} | {speed:,.0f} | 1 | |"
    ratios = _ratios(chunks, base)
    more = [(own.seconds - theirs.seconds) * 1e6 for own, theirs in zip(chunks, base, strict=True)]
    ratio = f"**{statistics.median(ratios):.3f}** ({min(ratios):.3f} to {max(ratios):.3f})"
    return f"| {PEERS[peer].title} | {speed:,.0f} | {ratio} | {statistics.median(more):+,.0f} |"


def _notes(results: Results, wanted: Sequence[str]) -> list[str]:
    asked = [PEERS[name] for name in wanted]
    packages = sorted({peer.package for peer in asked if peer.is_installed()})
    rounds = ", ".join(f"{name}: {_rounds(CASES[name], chunks[BASE])}" for name, chunks in results.items())
    missing = [peer.title for peer in asked if not peer.is_installed()]
    return [
        f"Medians over rounds in which all take turns ({rounds}; of each step the 10th percentile;"
        f" fp32). {made_with(*packages)}"
        " Made by `python benchmarks/throughput.py`.",
        *(f"Not installed, so not measured: {title}." for title in missing),
    ]


def _by_title(chunks: Mapping[str, Sequence[Chunk]]) -> dict[str, list[float]]:
    titled = {PEERS[name].title.strip("*"): own for name, own in chunks.items() if name != BASE}
    return {title: _ratios(own, chunks[BASE]) for title, own in titled.items()}


def _check(results: Results, at_most: float) -> None:
    for name, chunks in results.items():
        ratio = statistics.median(_ratios(chunks["ddptrain"], chunks[BASE]))
        if ratio > at_most:
            raise SystemExit(f"{name}: ddptrain's step is {ratio:.3f} hand-written ones; at most {at_most}")


def _ratios(own: Sequence[Chunk], base: Sequence[Chunk]) -> list[float]:
    """Of a step's seconds, round by round."""
    return [a.seconds / b.seconds for a, b in zip(own, base, strict=True)]


def _rounds(case: Case, chunks: Sequence[Chunk]) -> str:
    threads = f"{case.threads} thread{'s' * (case.threads > 1)}"
    return f"{len(chunks)} rounds of {case.steps} steps, {threads}{' a rank' * (case.ranks > 1)}"


def _arguments() -> argparse.Namespace:
    parser = table_parser(__doc__, NAME)
    parser.add_argument("--cases", default=",".join(CASES), help="of %(default)s")
    parser.add_argument("--rounds", type=at_least_one, help="of each case, instead of its own")
    parser.add_argument("--peers", help=f"{BASE} and some of {', '.join(PEERS)}")
    parser.add_argument(
        "--at-most", type=float, metavar="RATIO",
        help="fail where the median of ddptrain's step is longer than so many of the hand-written loop's",
    )  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it, too")
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)  # how this starts itself
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = [name for name in arguments.cases.split(",") if name not in CASES]
    if unknown:
        parser.error(f"--cases: {unknown[0]} is none of {', '.join(CASES)}")
    return arguments


if __name__ == "__main__":
    main()
