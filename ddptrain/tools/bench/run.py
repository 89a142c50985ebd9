"""The verb ``bench``: where a recipe's step goes on this machine, and which overrides make it faster."""

import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain.api.timing import TRAINING
from ddptrain.config.instantiate import typed_arguments
from ddptrain.config.schema import Config
from ddptrain.config.strategy import uses_ddp
from ddptrain.distributed.launcher.process import end_as_by_ctrl_c
from ddptrain.errors import ExitCode, UserError
from ddptrain.observe.console import open_log
from ddptrain.text import print_tables, say
from ddptrain.tools.bench.ab_compare import (
    Bench,
    BenchResult,
    OverrideResult,
    compare_candidates,
)
from ddptrain.tools.bench.ddp import exposed_table, of_ddp, ranks_for
from ddptrain.tools.bench.paced_run import LapTimes, Unfit

if TYPE_CHECKING:
    from rich.table import Table

_ENDLESS = 1_000_000
_OWN = (
    *(f"train.steps={_ENDLESS}", f"train.eval_every={_ENDLESS}", f"checkpoint.every={_ENDLESS}"),
    *("observers=[]", "hang_timeout=null", "train.verify_every=null", "train.time_limit=null"),
)
"""Overrides of every training here: nothing but steps, without end."""
_NAMED_HERE = (
    *("run.", "log.every", "observers", "checkpoint.every"),
    *("train.steps", "train.epochs", "train.eval_every"),
)
_OTHER_NUMBERS = {
    "precision=": "another precision computes",
    "strategy.compression=": "compressed gradients are",
}


@dataclass(frozen=True, slots=True)
class _Options:
    """The words of the verb itself."""

    steps: int = 10
    rounds: int = 6
    ranks: int = 1
    tries: str = ""
    ddp: bool = False


def run(config: Config, words: Sequence[str], settings: Mapping[str, str]) -> int:
    """Measure the training that ``words`` (options and overrides, checked by the caller) describe, alone and
    in turns with itself under other overrides.

    settings: the verb's own words, see `_Options`. Raises UserError for what the user can mend.
    """
    typed = typed_arguments(
        _Options, {("tries" if n == "try" else n): v for n, v in settings.items()}, "bench"
    )
    own = _Options(**typed)
    tries = None if "tries" not in typed else [word.strip() for word in own.tries.split(";") if word.strip()]
    for word in [*words, *(word for override in tries or () for word in _words(override))]:
        if word.lstrip("+").startswith(_NAMED_HERE):
            raise UserError(f"{word}: bench decides that itself; leave it out.")
    for name, value, least in (("steps", own.steps, 1), ("rounds", own.rounds, 3), ("ranks", own.ranks, 1)):
        if value < least:
            raise UserError(f"{name}={value}: must be {least} or more.")
    ranks = ranks_for(config, typed.get("ranks")) if own.ddp else own.ranks
    open_log(None, first=True)
    end_as_by_ctrl_c()  # its trainings end with it
    folder = Path(tempfile.mkdtemp(prefix="ddptrain-bench-"))
    if config.thaw is not None:
        say("note        what thaw= trains later is trained in all steps of this bench")
    thawed = ["freeze=[]", "thaw=null"] if config.thaw is not None else []
    bench = Bench([*words, *thawed, *_OWN], ranks, own.steps, own.rounds, folder)

    def candidates(setup: Mapping[str, Any]) -> Sequence[str]:
        if tries is not None:
            return tries
        return of_ddp(config, setup) if own.ddp else _candidates(config, setup)

    try:
        bench_result = compare_candidates(bench, candidates)
        print_tables(exposed_table(bench_result) if own.ddp else _table(bench_result))
        _recommend(bench, bench_result, words)
        return ExitCode.CRASH if tries and not bench_result.results else ExitCode.DONE
    except Unfit as error:
        print(f"bench: FAILED: {error}", flush=True)
        return ExitCode.USER_ERROR if error.code == ExitCode.USER_ERROR else ExitCode.CRASH
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _words(override: str) -> list[str]:
    """The words of one entry of ``try``. Raises UserError where one is no override."""
    try:
        words = shlex.split(override)
    except ValueError as error:
        raise UserError(f"try={override}: {error}. Close the quote.") from error
    for word in words:
        if "=" not in word and not word.startswith("~"):
            raise UserError(
                f"try={word}: is no override. Give key=value, several with ; between them, in quotes:"
                " try='channels_last=true;compile=default'."
            )
    return words


def _recommend(bench: Bench, bench_result: BenchResult, words: Sequence[str]) -> None:
    """The fastest command, to copy."""
    launch = [] if bench.ranks == 1 else ["launch", f"--nproc-per-node={bench.ranks}"]
    heading, more = "nothing tried is faster than it is:", list[str]()
    if fastest := bench_result.fastest:
        heading, more = f"{1 / fastest.ratio:.2f} times as fast:", shlex.split(fastest.override)
    print(f"{heading} python -m ddptrain {shlex.join([*launch, *words, *more])}", flush=True)
    for key, what in _OTHER_NUMBERS.items():
        if any(word.startswith(key) for word in more):
            print(f"({what} other numbers: compare the metrics too)", flush=True)


def _candidates(config: Config, setup: Mapping[str, Any]) -> list[str]:
    """Overrides that could help this run and change nothing that it is meant to learn."""
    on_gpu = setup["device"] == "cuda"
    overrides = []
    if setup["convolves"]:
        overrides.append(f"channels_last={str(not config.channels_last).lower()}")
    precisions = ("fp32", "tf32", "bf16", "fp16") if on_gpu else ("fp32", "bf16")
    overrides += [f"precision={name}" for name in precisions if name != setup["precision"]]
    if config.compile == "off":
        overrides += ["compile=default", *(["compile=reduce-overhead", "compile=graph"] if on_gpu else [])]
    if setup["resident"] is not None and "resident" in config.data:
        overrides.append(f"data.resident={str(not setup['resident']).lower()}")
    if "workers" in config.data and not (setup["resident"] and setup["workers"] is None):
        workers = setup["workers"] or 0
        overrides += [f"data.workers={count}" for count in sorted({0, 2, 4, 2 * workers} - {workers})]
    if setup["ranks"] > 1 and uses_ddp(config.strategy):
        overrides += ["strategy.bucket_cap_mb=5", "strategy.bucket_cap_mb=100", "strategy.compression=bf16"]
    if config.optim.get("fused") is None and config.optim.get("foreach") is None:
        overrides.append(f"+optim.fused={str(not setup['fused']).lower()}")
    return overrides


def _table(bench_result: BenchResult) -> "Table":
    from rich import box
    from rich.table import Table

    laps = [bench_result.itself.lap, *(result.lap for result in bench_result.results)]
    phases = [phase for phase in TRAINING if any(_share(lap, phase) >= 0.005 for lap in laps)]
    table = Table(box=box.SIMPLE)
    table.add_column("override", overflow="fold")
    shares = [phase.replace("_", "-") for phase in phases]
    for name in ("ratio", "least", "most", "ms/step", "peak MiB", *shares):
        table.add_column(name, justify="right")
    table.add_row("as it is", *_cells(bench_result.itself, phases))
    for result in sorted(bench_result.results, key=lambda result: result.ratio):
        table.add_row(
            result.override, *_cells(result, phases), style="green" if result in bench_result.helping else ""
        )
    return table


def _cells(result: OverrideResult, phases: Sequence[str]) -> list[str]:
    compared = [result.ratio, min(result.ratios), max(result.ratios)]
    shares = [f"{_share(result.lap, phase):.0%}" for phase in phases]
    own = [f"{result.lap.ms_per_step:.2f}", f"{result.lap.peak_memory / 2**20:,.0f}"]
    return [*(f"{ratio:.3f}" for ratio in compared), *own, *shares]


def _share(lap: LapTimes, phase: str) -> float:
    return lap.seconds[phase] / max(sum(lap.seconds.values()), 1e-9)
