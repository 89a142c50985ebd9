"""A sweep from its points to its ledger."""

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ddptrain.config.schema import Config, Sweep
from ddptrain.errors import ExitCode, UserError
from ddptrain.observe.lock import is_locked
from ddptrain.text import counted
from ddptrain.tools.sweep.board import Board, common_words, print_table
from ddptrain.tools.sweep.ledger import Job, Ledger, job_key, read_ledger
from ddptrain.tools.sweep.local import LocalMachine
from ddptrain.tools.sweep.machines import Machines
from ddptrain.tools.sweep.pool import Pool, unfinished
from ddptrain.tools.sweep.pruning_rules import PruningRule, pruning_rule
from ddptrain.tools.sweep.ranges import Point, Range, ends
from ddptrain.tools.sweep.ray_cluster import RayCluster
from ddptrain.tools.sweep.remote import RemoteMachines, check_remote
from ddptrain.tools.sweep.search import Search
from ddptrain.tools.sweep.slots import share_out
from ddptrain.tools.sweep.slurm import Slurm

_FIRST_POINTS = 8
"""Of a search, that the plan shows."""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One job that a sweep asks for."""

    config: Config
    words: tuple[str, ...]
    """The command line that makes this config."""
    program: str = ""
    """A digest of what ``--script`` names, as the sweep began with it."""


class SweepRunner:
    """Runs one sweep: a sweeper may come up with its points batch by batch."""

    def __init__(self) -> None:
        self._ledger: Ledger | None = None
        self._numbers: set[int] = set()
        """Of the jobs of its points."""

    def run(self, points: Sequence[SweepPoint]) -> list[Job]:
        """Run what is not done yet of these points; returns each one's job. Or, under ``sweep.dry_run``, say
        what would be run.

        Raises UserError for what can't be packed, Stopped and KeyboardInterrupt as `Pool.run`.
        """
        if not points:
            raise UserError("--multirun: these values make no job; one of the lists is empty.")
        settings, folder = _settings(points), _folder(points)
        machines, rule = _machines(points[0].config), pruning_rule(settings)
        if settings.dry_run:
            jobs = _planned(points, folder)
            plan = {job.number: (job, point.config) for job, point in zip(jobs, points, strict=True)}
            _print_plan(list(plan.values()), folder, machines, rule)
            return jobs
        self._ledger = ledger = self._ledger or Ledger(folder)
        jobs = [ledger.job(job_key(point.config, point.program), point.words) for point in points]
        batch = {job.number: point.config for job, point in zip(jobs, points, strict=True)}
        self._numbers |= batch.keys()
        distinct = [job for job in ledger.jobs if job.number in batch]
        board = Board(common_words(distinct))
        done = len(distinct) - len(unfinished(distinct, rule))
        board.say(f"sweep {folder}: {counted(len(distinct), 'job')}, {done} of them done before")
        board.say(machines.describe())
        Pool(ledger, machines, rule, board).run(batch, self._numbers)
        _note_late(distinct, rule, board)
        return jobs

    def search(self, ranges: Sequence[Range], make: Callable[[Point], SweepPoint]) -> None:
        """Try points of these ranges, as ``sweep.search`` says. make: a point's job. Raises as `run`, and
        UserError for what can't be searched."""
        corners = [make(point) for point in ends(ranges)]  # what is refused there is refused now
        settings, folder = _settings(corners), _folder(corners)
        names = {each.name for each in ranges}
        fixed = [word for word in corners[0].words if word.partition("=")[0] not in names]
        search = Search(settings, ranges, fixed)
        machines, rule = _machines(corners[0].config), pruning_rule(settings)
        if settings.dry_run:
            _print_search(search, [str(each) for each in ranges], make, folder, machines)
            return
        self._ledger = ledger = Ledger(folder)
        before, changed = _asked_before(search, ledger.jobs, make)
        self._numbers, left = set(before), dict[int, Config]()
        for job, composed in before.values():
            if composed is not None and job.status != "done":
                left[ledger.job(job.key, composed.words).number] = composed.config

        def jobs() -> list[Job]:
            return [job for job in ledger.jobs if job.number not in changed]

        board = Board(fixed)
        board.say(f"sweep {folder}: {search.describe()}, {len(before)} of them asked for before")
        if changed:
            board.say(f"note  {counted(len(changed), 'job')} had another recipe or program: not counted")
        board.say(machines.describe())

        def more() -> tuple[Job, Config] | None:
            while (point := search.next_point(jobs())) is not None:
                try:
                    sweep_point = make(point)
                    break
                except UserError as error:  # values that can't go together
                    words = search.words(point)
                    refused = ledger.job(_refused_key(words), words)
                    ledger.write(refused, "ended", status="failed", code=2, why=str(error), seconds=0.0)
                    self._numbers.add(refused.number)
                    board.changed(refused)
            else:
                return None
            job = ledger.job(job_key(sweep_point.config, sweep_point.program), sweep_point.words)
            self._numbers.add(job.number)
            return job, sweep_point.config

        Pool(ledger, machines, rule, board).run(left, frozenset(self._numbers), more)
        tried = [job for job, _ in search.points(jobs())]
        if len(tried) < search.trials:
            board.say(f"note  the search ends after {counted(len(tried), 'point')}: it draws no new ones")
        _note_late(tried, rule, board)

    def close(self) -> ExitCode:
        """Print the outcomes of all points. Returns the exit code: a crash where one has failed,
        stopped where one is only half done."""
        if self._ledger is None or not self._numbers:
            return ExitCode.DONE
        folder = self._ledger.folder
        jobs = read_ledger(folder, live=False)
        print_table(jobs)
        print(f"look  {folder}/<job>/plots, or tensorboard --logdir {folder}", file=sys.stderr)
        statuses = {job.status for job in jobs if job.number in self._numbers}
        if statuses & {"failed", "timeout"}:
            return ExitCode.CRASH
        return ExitCode.DONE if statuses <= {"done", "pruned"} else ExitCode.STOPPED


def _machines(config: Config) -> Machines:
    """Where the jobs run. Raises UserError where there is no such place."""
    if config.sweep.on == "local":
        return LocalMachine(share_out(config))
    check_remote(config)
    return RemoteMachines(Slurm(config) if config.sweep.on == "slurm" else RayCluster(config), config)


def _settings(points: Sequence[SweepPoint]) -> Sweep:
    first = points[0].config
    for point in points:
        for name, value in asdict(point.config.sweep).items():
            if value != getattr(first.sweep, name):
                raise UserError(f"sweep.{name}: says how all jobs are run; give it one value.")
        if point.config.device != first.device:
            raise UserError("device: all jobs of a sweep share the machine's; give it one value.")
    return first.sweep


def _folder(points: Sequence[SweepPoint]) -> Path:
    recipes = "+".join(sorted({point.config.recipe for point in points}))
    return Path(points[0].config.sweep.dir or Path("sweeps", recipes))


def _note_late(jobs: Sequence[Job], rule: PruningRule, board: Board) -> None:
    late = [job for job in jobs if job.evaluations and job.evaluations[0].share >= 1]
    if rule.prunes and late:
        board.say(
            f"note  {counted(len(late), 'job')} first evaluated at the end: set train.eval_every to prune"
        )


def _planned(points: Sequence[SweepPoint], folder: Path) -> list[Job]:
    """The jobs as the ledger would have them; nothing is written."""
    known = {job.key: job for job in read_ledger(folder, is_locked(folder))}
    jobs = []
    for point in points:
        key = job_key(point.config, point.program)
        job = known.setdefault(key, Job(len(known), key, point.words))
        job.words = point.words
        jobs.append(job)
    return jobs


def _print_plan(
    plan: Sequence[tuple[Job, Config]], folder: Path, machines: Machines, rule: PruningRule
) -> None:
    left = unfinished([job for job, _ in plan], rule)
    print(f"sweep {folder}: {counted(len(plan), 'job')}, {len(left)} to run; {machines.describe()}")
    _print_commands(plan, folder, machines)


def _print_commands(plan: Sequence[tuple[Job, Config]], folder: Path, machines: Machines) -> None:
    for job, config in plan:
        line = shlex.join(machines.command(job, folder, config)[1:])
        print(f"{job.folder}  {job.status:8} python {line}")


def _asked_before(
    search: Search, jobs: Sequence[Job], make: Callable[[Point], SweepPoint]
) -> tuple[dict[int, tuple[Job, SweepPoint | None]], set[int]]:
    """The jobs that are points of a search, by number, each with what its point makes now (None where that is
    refused, as it was); and the numbers of those of which it makes another config than it did, or another
    program. 10 ms a job."""
    before: dict[int, tuple[Job, SweepPoint | None]] = {}
    points = search.points(jobs)
    for job, point in points:
        try:
            composed = make(point)
            key = job_key(composed.config, composed.program)
        except UserError:
            composed, key = None, _refused_key(search.words(point))
        if key == job.key:
            before[job.number] = job, composed
    return before, {job.number for job, _ in points} - before.keys()


def _refused_key(words: Sequence[str]) -> str:
    """In place of a config's hash, for words that make none."""
    return f"refused {shlex.join(words)}"


def _print_search(
    search: Search,
    ranges: Sequence[str],
    make: Callable[[Point], SweepPoint],
    folder: Path,
    machines: Machines,
) -> None:
    """The ranges, and the points that would be started at once."""
    known = read_ledger(folder, is_locked(folder))
    before, changed = _asked_before(search, known, make)
    jobs = [job for job in known if job.number not in changed]
    print(
        f"sweep {folder}: {search.describe()}, {len(before)} of them asked for before; {machines.describe()}"
    )
    print(*ranges, sep="\n")
    plan = [
        (job, composed.config)
        for job, composed in before.values()
        if composed is not None and job.status != "done"
    ]
    while len(plan) < min(machines.parallel, _FIRST_POINTS) and (point := search.next_point(jobs)):
        jobs.append(Job(len(jobs) + len(changed), "", search.words(point)))
        try:
            plan.append((jobs[-1], make(point).config))
        except UserError as error:
            jobs[-1].status, jobs[-1].code = "failed", ExitCode.USER_ERROR
            print(f"refused  {error}")
    _print_commands(plan[:_FIRST_POINTS], folder, machines)
