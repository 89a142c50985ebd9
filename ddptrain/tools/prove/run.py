"""The verb ``prove``: whether a recipe keeps the promises of resume, world size and evaluation.

By whole trainings, started as a user starts them and compared by what they leave on the disk.
"""

import json
import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random, SystemRandom

from rich.console import Console
from rich.table import Table
from torch import nn

from ddptrain.api.world import World
from ddptrain.config.instantiate import typed_arguments
from ddptrain.config.schema import Config
from ddptrain.distributed.cpu import cores
from ddptrain.distributed.launcher.process import end_as_by_ctrl_c
from ddptrain.errors import ExitCode, UserError
from ddptrain.observe.console import open_log
from ddptrain.run.assemble import eval_batch_size
from ddptrain.run.setup import check_extensions, make_model, make_task, prepare
from ddptrain.text import first_few
from ddptrain.tools.prove.kill_schedule import Moment, carry_out, marks, moments_of, next_kill, saved_step
from ddptrain.tools.prove.process import Case, ProofResult, TrialFailed, Trials
from ddptrain.tools.prove.state_diff import State, differences, first_line_apart, last_state, relative
from ddptrain.tools.prove.world import prove_world

log = logging.getLogger("ddptrain")

_RUNS_A_KILL = 4
"""Runs that may end before their kill comes, for each that is asked for."""
_METRIC_ROUNDING = 1e-5
"""Relative, in fp32: metrics from other batches differ by less, unless they are averages of averages."""
_WIDTH = 118
"""Of a table that is written to a file."""


def run(config: Config, proof: str, settings: Mapping[str, str], words: Sequence[str]) -> int:
    """Prove one promise: ``resume``, ``world`` or ``eval``. Returns the exit code: 1 where it is not kept.

    settings: the words of the proof itself, as typed, and ``out``, a new folder to work in, which is kept.
    words: what all its trainings are started with. Raises UserError for what the user can mend.
    """
    for key in ("run.dir", "run.resume", "run.mirror"):
        if any(word.lstrip("+").startswith(f"{key}=") for word in words):
            raise UserError(f"{key}: prove names the folders itself, inside of out=<folder>; leave it out.")
    open_log(None, first=True)
    end_as_by_ctrl_c()  # its trainings end with it
    prove = {"resume": prove_resume, "world": prove_world, "eval": prove_eval}[proof]
    of_proof = dict(settings)
    named = of_proof.pop("out", None)
    arguments = typed_arguments(prove, of_proof, f"prove {proof}")
    make_task(config)  # refuses what is wrong in its nodes
    check_extensions(config)
    observers = [node["_target_"] for node in config.observers.values()]
    if proof != "eval" and "ddptrain.observe.jsonl.Jsonl" not in observers:
        raise UserError(f"prove {proof}: compares metrics.jsonl; add jsonl: observers=[console,jsonl].")
    folder = _new_folder(named)
    keep = True
    try:
        result = prove(Case(config, words, folder, cores(), partial(_model, config)), **arguments)
        keep = not result.holds or named is not None
        terminal = Console()
        Console(width=terminal.width if terminal.is_terminal else _WIDTH).print(result.table)
        print(f"prove {proof}: {result.summary}", flush=True)
        return ExitCode.DONE if result.holds else 1
    except TrialFailed as error:
        print(f"prove {proof}: FAILED: {error}", flush=True)
        return ExitCode.USER_ERROR if error.code == ExitCode.USER_ERROR else 1
    except (UserError, KeyboardInterrupt):
        keep = named is not None
        raise
    finally:
        if keep:
            log.info("kept       %s", folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _model(config: Config) -> nn.Module:
    task, data = make_task(config)
    prepare(data, World(), config.seed)
    return make_model(config, task, World().device)


def prove_resume(case: Case, ranks: int = 2, kills: int = 3, moments: int | None = None) -> ProofResult:
    """Killed at random moments and started again, a run ends with the bits of one that nobody disturbed.

    moments: the seed of the moments.
    """
    if min(ranks, kills) < 1:
        raise UserError(f"prove resume: ranks={ranks} kills={kills}: both must be 1 or more.")
    if ranks > 1 and not Path("/proc").is_dir():
        raise UserError(f"ranks={ranks}: ranks to kill are found in /proc, which is Linux's. Use ranks=1.")
    seed = SystemRandom().randrange(10**6) if moments is None else moments
    log.info("moments    follow from moments=%d", seed)
    draw, trials, whole = Random(seed), case.trials(ranks), case.folder / "undisturbed"
    with trials.training(whole.name, ranks) as running:
        timeline = moments_of(running, whole)
    ours = last_state(whole)
    table = Table("kill", "of", "when", "it went on from", title=f"resume, ranks={ranks} moments={seed}")
    for number in range(1, _RUNS_A_KILL * kills + 1):
        run = case.folder / f"killed-{number}"
        _train_with_kills(trials, run, ranks, timeline, draw, kills, table)
        differing, line = differences(ours, last_state(run)), first_line_apart(whole, run)
        if differing or line or table.row_count == kills:
            break
    else:
        came = f"only {table.row_count} of {kills} kills came in time"
        raise UserError(f"prove resume: {came}. Raise train.steps.")
    if not differing and not line:
        same = f"{len(ours)} values of its state, and metrics.jsonl"
        return ProofResult(True, f"HOLDS: killed {kills} times, it ends with the same bits: {same}.", table)
    problems = (
        [f"{len(differing)} of {len(ours)} values of its state differ, first {differing[0]}"]
        if differing
        else []
    )
    problems += [f"metrics.jsonl differs first at {line} (undisturbed and killed)"] if line else []
    return ProofResult(False, f"BROKEN: {'; '.join(problems)}; {_repeats(trials, ranks, ours)}.", table)


def _train_with_kills(
    trials: Trials, run: Path, ranks: int, timeline: Sequence[Moment], draw: Random, kills: int, table: Table
) -> None:
    """Start a run, kill it until the table has ``kills`` rows, and let it go to its end."""
    while (still := kills - table.row_count) and (kill := next_kill(draw, timeline, run, ranks, still)):
        with trials.training(run.name, ranks) as running:
            if not carry_out(kill, running, run):
                return
        if timeline[-1].mark in marks(run) and saved_step(run) == timeline[-1].step:
            break  # all was on the disk: there is nothing to go on with
        who = f"rank {kill.victims[0]}" if len(kill.victims) == 1 else "all ranks"
        saved = f"step {saved_step(run)}" if saved_step(run) else "the beginning"
        table.add_row(str(table.row_count + 1), who, str(kill), saved)
        log.info("killed     %s %s; goes on from %s", who, kill, saved)
    trials.trained(run.name, ranks)


def _repeats(trials: Trials, ranks: int, ours: State) -> str:
    """Whether it is the kills at all that make the difference."""
    again = trials.trained("undisturbed-again", ranks)
    if not differences(ours, last_state(again)):
        return "two undisturbed runs are equal: something that the training goes on from is in no checkpoint"
    device = json.loads((again / "environment.json").read_text())["device"]
    hint = " (on a GPU, bits repeat with deterministic=true)" if device != "cpu" else ""
    return f"two undisturbed runs differ too: something is random that does not follow from the seed{hint}"


def prove_eval(case: Case, ranks: int = 4) -> ProofResult:
    """``evaluate`` prints the same bytes on any number of ranks, and its batches do not matter."""
    if ranks < 2:
        raise UserError(f"prove eval: ranks={ranks}: must be 2 or more.")
    trials = case.trials(ranks)
    size = _uneven_batch(case.config)
    trained = trials.trained("trained", 1)
    first = trials.evaluated("on-1", trained, 1)
    table, broken = Table("evaluated", "against 1 rank", title=f"eval, ranks={ranks}"), []
    for count in range(2, ranks + 1):
        printed = trials.evaluated(f"on-{count}", trained, count)
        apart = "" if printed == first else _metrics_apart(first, printed) or "the order of the metrics"
        table.add_row(f"on {count} ranks", apart or "equal, byte for byte")
        broken += [f"on {count} ranks {apart}"] if apart else []
    if size:
        own = eval_batch_size(case.config)
        one, other = (
            # in fp32, because other batches round in another way
            trials.evaluated(f"by-{n}", trained, 1, "precision=fp32", f"train.eval_batch_size={n}")
            for n in (own, size)
        )
        apart = _metrics_apart(one, other, _METRIC_ROUNDING)
        table.add_row(f"in batches of {size}, not {own}", apart or "equal to rounding")
        broken += [f"in batches of {size} {apart}: an average of averages?"] if apart else []
    if broken:
        return ProofResult(False, f"BROKEN: {'; '.join(broken)}", table)
    metrics = {name: value for name, value in json.loads(first).items() if isinstance(value, float)}
    shown = "  ".join(f"{name} {value:.6g}" for name, value in metrics.items() if "/" not in name)
    return ProofResult(True, f"HOLDS: evaluate prints the same bytes on 1 to {ranks} ranks: {shown}", table)


def _uneven_batch(config: Config) -> int | None:
    """Another size of evaluation batches, of which the last is the smallest part of the others: an average
    over batches then gives its samples the largest weight. None where there is none."""
    _, data = make_task(config)
    prepare(data, World(), config.seed)
    own = eval_batch_size(config)
    sizes = range(2, min(own, data.valid_size - 1) + 1)
    uneven = [n for n in sizes if data.valid_size % n and n != own]
    return min(uneven, key=lambda n: (data.valid_size % n / n, -n), default=None)


def _metrics_apart(one: str, other: str, tolerance: float = 0.0) -> str:
    """The metric that differs most between two lines of ``evaluate``, in words; '' where none does."""
    ours, theirs = json.loads(one), json.loads(other)
    pairs = {name: (ours.get(name), theirs.get(name)) for name in {**ours, **theirs}}
    apart = {name: relative(*pair) for name, pair in pairs.items() if pair[0] != pair[1]}
    differ = sorted((name for name in apart if apart[name] > tolerance), key=lambda name: -apart[name])
    words = [f"{name} is {theirs.get(name)}, not {ours.get(name)}" for name in differ]
    return first_few(words, 1)


def _new_folder(named: str | None) -> Path:
    if named is None:
        return Path(tempfile.mkdtemp(prefix="ddptrain-prove-"))
    folder = Path(named)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out={named}: can't be made ({error.strerror}). Name another folder.") from error
    if any(folder.iterdir()):
        raise UserError(f"out={named}: is not empty; name a new folder, for a run in it would be resumed.")
    return folder
