"""A sweep from its points to its ledger."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ddptrain.config.schema import Config, Sweep
from ddptrain.errors import ExitCode, UserError
from ddptrain.observe.lock import is_locked
from ddptrain.sweep.beginnings import Beginnings
from ddptrain.sweep.board import Board, print_table
from ddptrain.sweep.ledger import Job, Ledger, key_of, read_ledger
from ddptrain.sweep.local import LocalMachine
from ddptrain.sweep.machines import Machines
from ddptrain.sweep.pool import Pool, unfinished
from ddptrain.sweep.pruning_rules import PruningRule, pruning_rule
from ddptrain.sweep.ray_cluster import RayCluster
from ddptrain.sweep.remote import RemoteMachines, check_remote
from ddptrain.sweep.sharing import Sharing, savings
from ddptrain.sweep.slots import share_out
from ddptrain.sweep.slurm import Slurm
from ddptrain.text import counted


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One job that a sweep asks for."""

    config: Config
    words: tuple[str, ...]
    """The command line that makes this config."""


class SweepRunner:
    """Runs one sweep: a sweeper may come up with its points batch by batch."""

    def __init__(self) -> None:
        self._ledger: Ledger | None = None
        self._asked: dict[int, Config] = {}

    def run(self, points: Sequence[SweepPoint]) -> list[Job]:
        """Run what is not done yet of these points; returns each one's job. Or, under ``sweep.dry_run``, say
        what would be run.

        Raises UserError for what can't be packed, Stopped and KeyboardInterrupt as `Pool.run`.
        """
        if not points:
            raise UserError("--multirun: these values make no job; one of the lists is empty.")
        settings = _settings(points)
        recipes = "+".join(sorted({point.config.recipe for point in points}))
        folder = Path(settings.dir or Path("sweeps", recipes))
        machines = _machines(points[0].config)
        rule = pruning_rule(settings)
        if settings.dry_run:
            jobs = _planned(points, folder)
            plan = {job.number: (job, point.config) for job, point in zip(jobs, points, strict=True)}
            _print_plan(list(plan.values()), folder, machines, rule)
            configs = {number: config for number, (_, config) in plan.items()}
            for line in savings(_beginnings(configs, settings), [job for job, _ in plan.values()], folder):
                print(line)
            return jobs
        self._ledger = ledger = self._ledger or Ledger(folder)
        jobs = [ledger.job(key_of(point.config), point.words) for point in points]
        batch = {job.number: point.config for job, point in zip(jobs, points, strict=True)}
        self._asked |= batch
        distinct = [job for job in ledger.jobs if job.number in batch]
        board = Board(distinct)
        done = len(distinct) - len(unfinished(distinct, rule))
        board.say(f"sweep {folder}: {counted(len(distinct), 'job')}, {done} of them done before")
        board.say(machines.describe())
        beginnings = _beginnings(batch, settings)
        for line in savings(beginnings, distinct, folder):
            board.say(line)
        sharing = Sharing(ledger, beginnings, machines.ranks, board)
        Pool(ledger, machines, rule, sharing, board).run(batch, self._asked)
        late = [job for job in distinct if job.evaluations and job.evaluations[0].share >= 1]
        if settings.prune != "none" and late:
            board.say(
                f"note  {counted(len(late), 'job')} first evaluated at the end: set train.eval_every to prune"
            )
        return jobs

    def close(self) -> ExitCode:
        """Print the outcomes of all points. Returns the exit code: a crash where one has failed,
        stopped where one is only half done."""
        if self._ledger is None or not self._asked:
            return ExitCode.DONE
        folder = self._ledger.folder
        jobs = read_ledger(folder, live=False)
        print_table(jobs)
        print(f"look  {folder}/<job>/plots, or tensorboard --logdir {folder}", file=sys.stderr)
        statuses = {job.status for job in jobs if job.number in self._asked}
        if statuses & {"failed", "timeout"}:
            return ExitCode.CRASH
        return ExitCode.DONE if statuses <= {"done", "pruned"} else ExitCode.STOPPED


def _machines(config: Config) -> Machines:
    """Where the jobs run. Raises UserError where there is no such place."""
    if config.sweep.on == "local":
        return LocalMachine(share_out(config))
    check_remote(config)
    return RemoteMachines(Slurm(config) if config.sweep.on == "slurm" else RayCluster(config), config)


def _beginnings(configs: Mapping[int, Config], settings: Sweep) -> Beginnings:
    """What jobs share; nothing where they are pruned, for then none is sure to get anywhere."""
    shares = settings.share and settings.prune == "none"
    return Beginnings(configs if shares else {})


def _settings(points: Sequence[SweepPoint]) -> Sweep:
    first = points[0].config
    for point in points:
        for name, value in asdict(point.config.sweep).items():
            if value != getattr(first.sweep, name):
                raise UserError(f"sweep.{name}: says how all jobs are run; give it one value.")
        if point.config.device != first.device:
            raise UserError("device: all jobs of a sweep share the machine's; give it one value.")
    return first.sweep


def _planned(points: Sequence[SweepPoint], folder: Path) -> list[Job]:
    """The jobs as the ledger would have them; nothing is written."""
    known = {job.key: job for job in read_ledger(folder, is_locked(folder))}
    keys = [key_of(point.config) for point in points]
    return [known.setdefault(key, Job(len(known), key, p.words)) for key, p in zip(keys, points, strict=True)]


def _print_plan(
    plan: Sequence[tuple[Job, Config]], folder: Path, machines: Machines, rule: PruningRule
) -> None:
    left = unfinished([job for job, _ in plan], rule)
    print(f"sweep {folder}: {counted(len(plan), 'job')}, {len(left)} to run; {machines.describe()}")
    for job, config in plan:
        line = shlex.join(machines.command(job, folder, config)[1:])
        print(f"{job.folder}  {job.status:8} python {line}")
