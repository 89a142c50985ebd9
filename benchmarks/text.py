"""Bits per byte that the text recipes need for held-out files, beside xz on the same bytes, on the CPU.

    python benchmarks/text.py                        # a Markdown table on stdout, in some 45 minutes
    python benchmarks/text.py --write docs/text.md    # and between that file's text markers
    python benchmarks/text.py --minutes 5 --recipes lstm_text,gru_text

Each recipe is trained from its first line to its last file within the same time: a short run tells how
fast its steps are and what the rest takes, and so how many steps fit. The whole process is timed, for a
user waits for start-up, evaluation and saving too.

A model that gives the next byte the probability p can be turned into a compressor that spends -log2(p)
bits on it (arithmetic coding), which makes the two comparable. What the decoder has to have beforehand is
counted for neither: the model's weights here, the training files in xz's third line.
"""

import argparse
import json
import lzma
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from common import made_with, publish, table_parser

from ddptrain.data.text.corpus import Document, StandardLibrary

NAME = "text"
"""Of the markers."""
RECIPES = ("lstm_text", "gru_text", "rnn_text", "transformer_text")
PROBE = 40
"""Steps of the run that tells how many fit into the time."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    title: str
    bits: float
    """Per byte."""
    perplexity: float
    seconds: float
    parameters: int | None = None
    steps: int | None = None
    command: str = ""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run says of itself, and the seconds of its process."""

    bits: float
    perplexity: float
    parameters: int
    steps_per_s: float
    """Of training alone."""
    seconds: float


def main() -> None:
    arguments = _arguments()
    _hold_to(arguments.cores)
    rows = compressed()
    for recipe in arguments.recipes.split(","):
        with tempfile.TemporaryDirectory() as folder:  # of each recipe, for checkpoints are large
            rows.append(trained(recipe, arguments.minutes * 60, Path(folder)))
    publish("\n".join([*_table(rows), "", _note(arguments.minutes)]), NAME, arguments.write)


def compressed() -> list[Row]:
    """xz on the held-out documents: knowing nothing, starting anew with each, and after the training ones."""
    corpus = StandardLibrary().corpus()
    documents = [_text([document]) for document in corpus.valid]
    known, text = _text(corpus.train), b"".join(documents)

    def row(title: str, parts: Sequence[bytes], free: bytes = b"") -> Row:
        began = time.perf_counter()
        size = sum(_xz_size(part) for part in parts) - (_xz_size(free) if free else 0)
        bits = 8 * size / len(text)
        return Row(title, bits, 2**bits, time.perf_counter() - began)

    print(f"xz: {len(known):,} bytes known, {len(text):,} held out", file=sys.stderr, flush=True)
    return [
        row("`xz -9e`, all files in one", [text]),
        row("`xz -9e`, file by file", documents),
        row("`xz -9e`, after the training files", [known + text], free=known),
    ]


def trained(recipe: str, seconds: float, folder: Path) -> Row:
    """A recipe's run of as many steps as fit into the time."""
    probe = _run(recipe, PROBE, folder / "probe")
    rest = probe.seconds - PROBE / probe.steps_per_s
    steps = int((seconds - rest) * probe.steps_per_s)
    print(f"{recipe}: {probe.steps_per_s:.2f} steps/s, the rest {rest:.0f} s", file=sys.stderr, flush=True)
    if steps < 1:
        raise SystemExit(f"--minutes: {recipe} takes {rest:.0f} s beside its steps; give it more")
    run = _run(recipe, steps, folder / "run")
    command = f"python -m ddptrain recipe={recipe} train.steps={steps}"
    return Row(f"`{recipe}`", run.bits, run.perplexity, run.seconds, run.parameters, steps, command)


def _run(recipe: str, steps: int, folder: Path) -> Trained:
    """Train by the command line, evaluate and save at the end; the token files lie beside the run."""
    words = [f"recipe={recipe}", f"train.steps={steps}", f"run.dir={folder.name}", *_timed_with(steps)]
    print(f"{recipe}: {steps} steps", file=sys.stderr, flush=True)
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "ddptrain", *words], cwd=folder.parent)
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        raise SystemExit(f"{recipe}: stopped, see above")
    summary = json.loads((folder / "summary.json").read_text())
    config = yaml.safe_load((folder / "config.yaml").read_text())
    parameters = re.search(r" ([\d,]+) parameters", (folder / "log.txt").read_text())
    assert parameters is not None
    return Trained(
        bits=summary["metrics"]["bits_per_byte"],
        perplexity=summary["metrics"]["perplexity"],
        parameters=int(parameters[1].replace(",", "")),
        steps_per_s=summary["samples_per_s"] / config["train"]["batch_size"],
        seconds=seconds,
    )


def _timed_with(steps: int | str) -> list[str]:
    """What changes how long a run takes, and not what it learns."""
    return [
        "device=cpu",
        f"train.eval_every={steps}",
        f"checkpoint.every={steps}",
        "observers=[console,jsonl,plots]",
    ]


def _hold_to(count: int) -> None:
    """Keep this process, and so those it starts, on its first so many cores."""
    free = sorted(os.sched_getaffinity(0))
    if not 1 <= count <= len(free):
        raise SystemExit(f"--cores {count}: must be from 1 to {len(free)}, the cores this may run on")
    os.sched_setaffinity(0, free[:count])
    os.environ["OMP_NUM_THREADS"] = str(count)


def _text(documents: Sequence[Document]) -> bytes:
    return b"".join(block for document in documents for block in document.blocks())


def _xz_size(data: bytes) -> int:
    """Bytes of ``xz -9e``, whose dictionary of 64 MiB holds all of the standard library."""
    return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))


def _table(rows: Sequence[Row]) -> list[str]:
    return [
        "| | bits per byte | perplexity | parameters | steps | seconds | repeated by |",
        "|---|---:|---:|---:|---:|---:|---|",
        *map(_line, rows),
    ]


def _line(row: Row) -> str:
    parameters = "" if row.parameters is None else f"{row.parameters:,}"
    steps = "" if row.steps is None else f"{row.steps:,}"
    command = f"`{row.command}`" if row.command else ""
    figures = f"{row.bits:.3f} | {row.perplexity:.2f} | {parameters} | {steps} | {row.seconds:,.1f}"
    return f"| {row.title} | {figures} | {command} |"


def _note(minutes: float) -> str:
    settings = " ".join(_timed_with("<steps>"))
    return (
        "The standard library's held-out files (every 20th); perplexity is per byte. Each recipe has"
        f" {minutes:g} minutes for its whole process, start-up, evaluation and saving included, and is timed"
        f" with `{settings}`, none of which changes what is learned. {made_with('torch')}"
        " Made by `python benchmarks/text.py`."
    )


def _arguments() -> argparse.Namespace:
    parser = table_parser(__doc__, NAME)
    parser.add_argument("--recipes", default=",".join(RECIPES), help="of %(default)s")
    parser.add_argument("--minutes", type=float, default=10.0, help="of each recipe (%(default)g)")
    parser.add_argument("--cores", type=int, default=2, help="that each process may use (%(default)s)")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.recipes.split(",") if name not in RECIPES]
    if unknown:
        parser.error(f"--recipes: {unknown[0]} is none of {', '.join(RECIPES)}")
    return arguments


if __name__ == "__main__":
    main()
