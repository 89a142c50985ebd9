"""The verb ``bench``: where a recipe's step goes on this machine, and which overrides make it faster."""

import inspect
import shlex
import shutil
import signal
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
from ddptrain.observe.timing import TRAINING, Timing, told

if TYPE_CHECKING:
    from rich.table import Table

_LAP_S = 1.0
"""A lap is long enough for this, in the shortest steps too."""
_GAIN = 0.97
"""Ratio of the step's time below which an override is worth taking, where there is no noise."""
_ENDLESS = 1_000_000
_OWN = (
    *(f"train.steps={_ENDLESS}", f"train.eval_every={_ENDLESS}", f"checkpoint.every={_ENDLESS}"),
    *("log.tensorboard=false", "hang_timeout=null", "strategy.verify_every=null", "train.time_limit=null"),
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


def run(config: Config, words: Sequence[str], asked: Mapping[str, str]) -> int:
    """Measure the training that ``words`` (options and overrides, checked by the caller) describe, alone and
    in turns with itself under other overrides.

    asked: the verb's own words, see `_asked`. Raises UserError for what the user can mend.
    """
    own = typed_arguments(_asked, {("tries" if n == "try" else n): v for n, v in asked.items()}, "bench")
    tries = None if "tries" not in own else [word.strip() for word in own["tries"].split(";") if word.strip()]
    for word in [*words, *(word for override in tries or () for word in shlex.split(override))]:
        if word.lstrip("+").startswith(_NAMED_HERE):
            raise UserError(f"{word}: bench decides that itself; leave it out.")
    defaults = inspect.signature(_asked).parameters
    steps, rounds, ranks = (own.get(n, defaults[n].default) for n in ("steps", "rounds", "ranks"))
    for name, value, least in (("steps", steps, 1), ("rounds", rounds, 3), ("ranks", ranks, 1)):
        if value < least:
            raise UserError(f"{name}={value}: must be {least} or more.")
    open_log(None, first=True)
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: its trainings end with it
        signal.signal(number, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="ddptrain-bench-"))
    bench = _Bench([*words, *_OWN], ranks, steps, rounds, folder)
    try:
        return _compared(bench, config, words, tries)
    except Unfit as error:
        print(f"bench: FAILED: {error}", flush=True)
        return ExitCode.USER_ERROR if error.code == ExitCode.USER_ERROR else ExitCode.CRASH
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _asked(model: object, steps: int = 10, rounds: int = 6, ranks: int = 1, tries: str = "") -> None:
    """What the verb itself takes, for `typed_arguments`."""


class _Bench:
    """Starts contestants that differ in overrides only."""

    def __init__(self, words: Sequence[str], ranks: int, steps: int, rounds: int, folder: Path) -> None:
        self._words, self.ranks, self._steps, self._rounds = words, ranks, steps, rounds
        self._folder = folder
        self._started = 0
        self._times = 0
        """A lap is so many of the shortest."""

    @contextmanager
    def contestant(self, *more: str) -> Iterator[Contestant]:
        self._started += 1
        folder = self._folder / str(self._started)
        contestant = Contestant([*self._words, *more], self.ranks, folder, self._steps)
        try:
            yield contestant
        finally:
            contestant.end()

    def duel(self, override: str) -> tuple[Lap, Result]:
        """Lap by lap in turns with the training as it is, both new: one process may be slower than its like
        for all its life. The training as it is, and the override. Raises Unfit."""
        with self.contestant() as baseline, self.contestant(*shlex.split(override)) as other:
            self._warm_up(baseline)
            self._warm_up(other)
            ours: list[Lap] = []
            theirs: list[Lap] = []
            for turn in range(self._rounds):
                # ABBA: neither always comes after the other
                for contestant in (baseline, other)[:: 1 if turn % 2 == 0 else -1]:
                    (ours if contestant is baseline else theirs).append(contestant.lap(self._times))
        ratios = [b.ms_per_step / a.ms_per_step for a, b in zip(ours, theirs, strict=True)]
        return _joined(ours), Result(override, _joined(theirs), ratios)

    def _warm_up(self, contestant: Contestant) -> None:
        contestant.warm_up()
        lap = contestant.lap()
        if not self._times:
            self._times = max(1, round(_LAP_S / max(sum(lap.seconds.values()), 1e-3)))


def _joined(laps: Sequence[Lap]) -> Lap:
    last = laps[-1]
    seconds = {phase: sum(lap.seconds[phase] for lap in laps) for phase in last.seconds}
    return Lap(sum(lap.steps for lap in laps), seconds, last.setup)


def _compared(bench: _Bench, config: Config, words: Sequence[str], tries: Sequence[str] | None) -> int:
    first, itself = bench.duel("")
    noise = max(itself.ratio, 1 / itself.ratio) - 1
    split = told(Timing(first.seconds, first.steps))
    _say(f"as it is    {first.ms_per_step:.2f} ms a step on {first.setup['device']}: {split}")
    least, most = min(itself.ratios), max(itself.ratios)
    _say(f"noise       against itself x{itself.ratio:.3f} ({least:.3f} to {most:.3f})")
    results = []
    for override in _candidates(config, first.setup) if tries is None else tries:
        began = time.monotonic()
        try:
            results.append(bench.duel(override)[1])
        except Unfit as error:
            _say(f"{override}  can't be had: {error}")
            continue
        _say(f"{override}  x{results[-1].ratio:.3f}  ({time.monotonic() - began:.0f} s)")
    best = _best_set([result for result in results if _helps(result, noise)])
    if len(best) > 1:
        together = " ".join(result.override for result in best)
        try:
            results.append(bench.duel(together)[1])
        except Unfit as error:
            _say(f"{together}  can't be had together: {error}")
    helping = [result for result in results if _helps(result, noise)]
    _print(_table(first, itself, results, helping))
    launch = [] if bench.ranks == 1 else ["launch", f"--nproc-per-node={bench.ranks}"]
    fastest = min(helping, key=lambda result: result.ratio, default=None)
    said = (
        "nothing tried is faster than it is:"
        if fastest is None
        else f"{1 / fastest.ratio:.2f} times as fast:"
    )
    more = [] if fastest is None else shlex.split(fastest.override)
    print(f"{said} python -m ddptrain {shlex.join([*launch, *words, *more])}", flush=True)
    if any(word.startswith("precision=") for word in more):
        print("(another precision computes other numbers: compare the metrics too)", flush=True)
    return ExitCode.CRASH if tries and not results else ExitCode.DONE


def _helps(result: Result, noise: float) -> bool:
    """Faster than what a training differs from its like by, and in three of four laps."""
    return result.ratio * (1 + noise) <= _GAIN and statistics.quantiles(result.ratios, n=4)[2] < 1


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
        best.setdefault("data" if key.startswith("data.") else key, result)
    return list(best.values())


def _table(first: Lap, itself: Result, results: Sequence[Result], helping: Sequence[Result]) -> "Table":
    from rich import box
    from rich.table import Table

    laps = [first, *(result.lap for result in results)]
    phases = [phase for phase in TRAINING if any(_share(lap, phase) >= 0.005 for lap in laps)]
    table = Table(box=box.SIMPLE)
    table.add_column("override", overflow="fold")
    for name in ("ratio", "least", "most", "ms/step", *(phase.replace("_", "-") for phase in phases)):
        table.add_column(name, justify="right")
    table.add_row("as it is", *_cells(itself, phases))
    for result in sorted(results, key=lambda result: result.ratio):
        table.add_row(result.override, *_cells(result, phases), style="green" if result in helping else "")
    return table


def _cells(result: Result, phases: Sequence[str]) -> list[str]:
    compared = [result.ratio, min(result.ratios), max(result.ratios)]
    shares = [f"{_share(result.lap, phase):.0%}" for phase in phases]
    return [*(f"{ratio:.3f}" for ratio in compared), f"{result.lap.ms_per_step:.2f}", *shares]


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
