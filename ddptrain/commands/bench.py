"""The verb ``bench``: where a recipe's step goes on this machine, and which overrides make it faster."""

import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain.build import typed_arguments
from ddptrain.commands.contestant import Contestant, Lap, Unfit
from ddptrain.config.schema import Config
from ddptrain.errors import ExitCode, UserError
from ddptrain.observe.console import open_log
from ddptrain.observe.timing import TRAINING

if TYPE_CHECKING:
    from rich.table import Table

_LAP_S = 1.0
"""A lap is long enough for this, in the shortest steps too."""
_GAIN = 0.97
"""Ratio of the step's time below which an override is worth taking; three of four laps have to be faster."""
_ENDLESS = 1_000_000
_OWN = (
    *(f"train.steps={_ENDLESS}", f"train.eval_every={_ENDLESS}", f"checkpoint.every={_ENDLESS}"),
    *("log.tensorboard=false", "hang_timeout=null", "strategy.verify_every=null"),
)
"""What every training here is told: to do nothing but steps, for ever."""
_NAMED_HERE = ("run.", "log.every", "train.steps", "train.epochs", "train.eval_every", "checkpoint.every")
_WIDTH = 140


@dataclass(frozen=True, slots=True)
class Result:
    """What an override came to."""

    override: str
    lap: Lap
    """All its laps together."""
    ratios: Sequence[float]
    """Of its step's time to the baseline's, lap by lap."""

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def helps(self) -> bool:
        return self.ratio <= _GAIN and statistics.quantiles(self.ratios, n=4)[2] < 1


def run(config: Config, words: Sequence[str], asked: Mapping[str, str]) -> int:
    """Measure the training that ``words`` (options and overrides, checked by the caller) describe, alone and
    in turns with itself under other overrides.

    asked: the verb's own words, see `_asked`. Raises UserError for what the user can mend.
    """
    for word in words:
        if word.lstrip("+").startswith(_NAMED_HERE):
            raise UserError(f"{word}: bench decides that itself; leave it out.")
    own = typed_arguments(_asked, {("tries" if n == "try" else n): v for n, v in asked.items()}, "bench")
    steps, rounds, ranks = (own.get(name, default) for name, default in _DEFAULTS.items())
    for name, value, least in (("steps", steps, 1), ("rounds", rounds, 3), ("ranks", ranks, 1)):
        if value < least:
            raise UserError(f"{name}={value}: must be {least} or more.")
    open_log(None, first=True)
    folder = Path(tempfile.mkdtemp(prefix="ddptrain-bench-"))
    bench = _Bench([*words, *_OWN], ranks, steps, rounds, folder)
    try:
        with bench.contestant() as baseline:
            return _compared(bench, baseline, config, words, own.get("tries"))
    except Unfit as error:
        print(f"bench: FAILED: {error}", flush=True)
        return ExitCode.CRASH
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_DEFAULTS = {"steps": 10, "rounds": 6, "ranks": 1}


def _asked(model: object, steps: int = 10, rounds: int = 6, ranks: int = 1, tries: str = "") -> None:
    """What the verb itself takes, for `typed_arguments`."""


class _Bench:
    """Starts contestants that differ in overrides only."""

    def __init__(self, words: Sequence[str], ranks: int, steps: int, rounds: int, folder: Path) -> None:
        self._words, self._ranks, self._steps, self._rounds = words, ranks, steps, rounds
        self._folder = folder
        self._started = 0
        self.times = 1
        """A lap is so many of the shortest."""

    @contextmanager
    def contestant(self, *more: str) -> Iterator[Contestant]:
        self._started += 1
        folder = self._folder / str(self._started)
        contestant = Contestant([*self._words, *more], self._ranks, folder, self._steps)
        try:
            yield contestant
        finally:
            contestant.end()

    def measured(self, baseline: Contestant) -> Lap:
        """The baseline by itself."""
        lap = baseline.warm_up()
        lap = baseline.lap()
        self.times = max(1, round(_LAP_S / max(sum(lap.seconds.values()), 1e-3)))
        return baseline.lap(self.times)

    def duel(self, baseline: Contestant, override: str) -> Result:
        """Lap by lap in turns. Raises Unfit."""
        with self.contestant(*shlex.split(override)) as other:
            other.warm_up()
            other.lap()
            laps, ratios, order = [], [], [baseline, other]
            for turn in range(self._rounds):
                # ABBA: neither always comes after the other
                ordered = order if turn % 2 == 0 else order[::-1]
                taken = {contestant: contestant.lap(self.times) for contestant in ordered}
                laps.append(taken[other])
                ratios.append(taken[other].ms_per_step / taken[baseline].ms_per_step)
        seconds = {phase: sum(lap.seconds[phase] for lap in laps) for phase in laps[0].seconds}
        return Result(override, _joined(laps, seconds), ratios)


def _joined(laps: Sequence[Lap], seconds: Mapping[str, float]) -> Lap:
    last = laps[-1]
    return Lap(sum(lap.steps for lap in laps), seconds, last.mfu, last.advice, last.setup)


def _compared(
    bench: _Bench, baseline: Contestant, config: Config, words: Sequence[str], asked: str | None
) -> int:
    first = bench.measured(baseline)
    _say(f"as it is    {first.ms_per_step:.2f} ms a step on {first.setup['device']}: {first.advice}")
    tried = _candidates(config, first.setup) if asked is None else [word for word in asked.split(";") if word]
    results, failed = [], []
    for override in tried:
        began = time.monotonic()
        try:
            results.append(bench.duel(baseline, override))
        except Unfit as error:
            failed.append(override)
            _say(f"{override}  can't be had: {error}")
            continue
        _say(f"{override}  x{results[-1].ratio:.3f}  ({time.monotonic() - began:.0f} s)")
    best = _best_set(results)
    if len(best) > 1:
        together = " ".join(result.override for result in best)
        try:
            results.append(bench.duel(baseline, together))
        except Unfit as error:
            _say(f"{together}  can't be had together: {error}")
    _print(_table(first, results))
    helping = [result for result in results if result.helps]
    if helping:
        fastest = min(helping, key=lambda result: result.ratio)
        said, line = f"{1 / fastest.ratio:.2f} times as fast:", [*words, *shlex.split(fastest.override)]
    else:
        said, line = "nothing tried is faster than it is:", list(words)
    print(f"{said} python -m ddptrain {shlex.join(line)}", flush=True)
    if any(result.override.startswith("precision=") for result in results):
        print("(another precision computes other numbers: compare the metrics too)", flush=True)
    return ExitCode.DONE


def _candidates(config: Config, setup: Mapping[str, Any]) -> list[str]:
    """Overrides that could help this run and change nothing that it is meant to learn."""
    on_gpu = setup["device"] == "cuda"
    found = []
    if setup["convolves"]:
        found.append(f"channels_last={str(not config.channels_last).lower()}")
    precisions = ("fp32", "tf32", "bf16", "fp16") if on_gpu else ("fp32", "bf16")
    found += [f"precision={name}" for name in precisions if name != setup["precision"]]
    if config.compile == "off":
        found += ["compile=default", *(["compile=reduce-overhead"] if on_gpu else [])]
    if setup["resident"] is not None and "resident" in config.data:
        found.append(f"data.resident={str(not setup['resident']).lower()}")
    if "workers" in config.data and not (setup["resident"] and setup["workers"] is None):
        workers = setup["workers"] or 0
        found += [f"data.workers={count}" for count in sorted({0, 2, 4, 2 * workers} - {workers})]
    if setup["ranks"] > 1:
        found += ["strategy.bucket_cap_mb=5", "strategy.bucket_cap_mb=100", "strategy.compression=bf16"]
    if config.optim.get("fused") is None and config.optim.get("foreach") is None:
        found.append(f"+optim.fused={str(not setup['fused']).lower()}")
    return found


def _best_set(results: Sequence[Result]) -> list[Result]:
    """Of each key the override that helps most; how the data are loaded is one key."""
    best: dict[str, Result] = {}
    for result in sorted(results, key=lambda result: result.ratio):
        key = result.override.partition("=")[0]
        if result.helps:
            best.setdefault("data" if key.startswith("data.") else key, result)
    return list(best.values())


def _table(first: Lap, results: Sequence[Result]) -> "Table":
    from rich import box
    from rich.table import Table

    laps = [first, *(result.lap for result in results)]
    phases = [phase for phase in TRAINING if any(_share(lap, phase) >= 0.005 for lap in laps)]
    table = Table(box=box.SIMPLE)
    table.add_column("override", overflow="fold")
    for name in ("ms/step", "ratio", "least", "most", *(phase.replace("_", "-") for phase in phases), "peak"):
        table.add_column(name, justify="right")
    table.add_row("as it is", *_cells(first, (), phases))
    for result in sorted(results, key=lambda result: result.ratio):
        style = "green" if result.helps else ""
        table.add_row(result.override, *_cells(result.lap, result.ratios, phases), style=style)
    return table


def _cells(lap: Lap, ratios: Sequence[float], phases: Sequence[str]) -> list[str]:
    compared = [statistics.median(ratios), min(ratios), max(ratios)] if ratios else [1.0]
    told = [f"{ratio:.3f}" for ratio in compared] + [""] * (3 - len(compared))
    shares = [f"{_share(lap, phase):.0%}" for phase in phases]
    return [f"{lap.ms_per_step:.2f}", *told, *shares, "" if lap.mfu is None else f"{lap.mfu:.0%}"]


def _share(lap: Lap, phase: str) -> float:
    return lap.seconds[phase] / max(sum(lap.seconds.values()), 1e-9)


def _print(table: "Table") -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    with console.capture() as drawn:
        console.print(table)
    for line in drawn.get().splitlines():  # rich fills its lines with blanks
        print(line.rstrip())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
