"""Searches: what they draw, that a rebuilt one draws the same, and real sweeps that search."""

import math
import random
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shell import ddptrain, early_refusal, refusal, with_imports
from sweeps import SWEPT, events, hide_optuna, start, statuses, swept_words

from ddptrain.config.overrides import parsed
from ddptrain.config.schema import Config, Sweep
from ddptrain.errors import UserError
from ddptrain.tools.sweep.board import print_table
from ddptrain.tools.sweep.ledger import Job, Ledger, job_key, read_ledger
from ddptrain.tools.sweep.ranges import Choice, Numbers, Point, Range
from ddptrain.tools.sweep.run import SweepPoint, SweepRunner
from ddptrain.tools.sweep.search import Search

pytest.importorskip("optuna")
pytest.importorskip("cmaes")

TYPED = f"--multirun --config-dir={SWEPT} recipe=swept device=cpu sweep.dir=sweep"
RATE = Numbers("optim.lr", 1e-4, 1e-1, log=True)
MIX = Numbers("data.mix", 0.0, 1.0)
ACTIVATION = Choice("model.activation", ("relu", "gelu", "tanh"))
WIDTH = Numbers("model.width", 8, 512, log=True, whole=True)
SEARCHES: dict[str, list[Range]] = {
    "tpe": [RATE, MIX, ACTIVATION, WIDTH],
    "random": [RATE, MIX, ACTIVATION],
    "cmaes": [RATE, MIX, WIDTH],
}
FIXED = ("recipe=x", "device=cpu")


def known_surface(point: Point) -> float:
    """At best 0, at a rate of 10^-2.3, a mix of 0.7 and gelu."""
    rate, mix = math.log10(float(point["optim.lr"])), float(point["data.mix"])
    lost = {"gelu": 0.0, "relu": 0.3, "tanh": 0.6}[point.get("model.activation", "gelu")]
    return -((rate + 2.3) ** 2) - (2 * (mix - 0.7)) ** 2 - lost


def searching(search: str, trials: int, seed: int = 0, **keys: object) -> Search:
    settings = Sweep(search=search, trials=trials, seed=seed, **keys)  # type: ignore[arg-type]
    return Search(settings, SEARCHES[search], FIXED)


def words_of(point: Point) -> tuple[str, ...]:
    return (*FIXED, *(f"{name}={text}" for name, text in point.items()))


def tried(
    search: Search, surface: Callable[[Point], float], before: Sequence[Job] = ()
) -> list[tuple[Point, float]]:
    """One point after the other, each with its value. before: jobs that the ledger has already."""
    jobs, points = list(before), []
    while (point := search.next_point(jobs)) is not None:
        job = Job(len(jobs), str(len(jobs)), words_of(point))
        job.status, job.value = "done", surface(point)
        jobs.append(job)
        points.append((point, job.value))
    return points


def test_tpe_beats_random_on_a_known_surface() -> None:
    """Two continuous ranges and one choice, thirty points; the best that each has found."""
    ranges = [RATE, MIX, ACTIVATION]
    better = 0
    for seed in range(10):
        best = {
            name: max(
                value
                for _, value in tried(
                    Search(Sweep(search=name, trials=30, seed=seed), ranges, FIXED), known_surface
                )
            )
            for name in ("tpe", "random")
        }
        print(f"seed {seed}: tpe {best['tpe']:.4f}, random {best['random']:.4f}")
        better += best["tpe"] > best["random"]
    assert better >= 9


def test_cmaes_converges() -> None:
    """On a surface of numbers: its last ten points are far better than its first ten, the best is near."""
    values = [value for _, value in tried(searching("cmaes", 80), known_surface)]
    assert sum(values[-10:]) > 0.2 * sum(values[:10])
    assert max(values) > -0.02


def test_cmaes_learns_from_points_that_it_has_not_asked_for() -> None:
    """From sixty of an earlier sweep: its next ten are better, though there are none of its own yet."""
    ranges = SEARCHES["cmaes"]
    earlier = tried(Search(Sweep(search="random", trials=60), ranges, FIXED), known_surface)
    jobs = [
        Job(number, str(number), words_of(point), status="done", value=value)
        for number, (point, value) in enumerate(earlier)
    ]
    values = [value for _, value in tried(searching("cmaes", 70), known_surface, jobs)][-10:]
    assert sum(values) / 10 > 0.6 * sum(value for _, value in earlier) / 60


@pytest.mark.parametrize(
    "search", [pytest.param(search, marks=[pytest.mark.long] * (search != "tpe")) for search in SEARCHES]
)
def test_a_search_that_is_made_again_from_the_ledger_asks_for_the_same(tmp_path: Path, search: str) -> None:
    """A life with jobs that run, fail, diverge, are pruned and go on: after each event, the search that lives
    and one that is made of the file, as another process does, agree on the next point."""
    dice = random.Random(7)
    living = searching(search, 60)
    ledger = Ledger(tmp_path)
    running: list[Job] = []
    while True:
        point = living.next_point(ledger.jobs)
        rebuilt = searching(search, 60).next_point(read_ledger(tmp_path, live=True))
        assert rebuilt == point
        if point is None:
            break
        if len(running) < 3 or dice.random() < 0.3:
            job = ledger.job(str(point), words_of(point))
            ledger.write(job, "started", gpus=[], on_cpu=True, on="local")
            running.append(job)
            continue
        job = running.pop(dice.randrange(len(running)))
        value = known_surface(dict(word.partition("=")[::2] for word in job.words))
        progress = {"steps": 9, "metric": "accuracy", "higher_is_better": True}
        ledger.write(job, "evaluated", step=3, value=value - 1, **progress)
        outcome = dice.choice(["done", "done", "pruned", "crash", "diverged", "revived"])
        ended = {"why": "", "seconds": 1.0, "code": 1}
        if outcome == "done":
            ledger.write(job, "ended", **{**ended, "code": 0}, status="done", value=value, **progress)
        elif outcome in ("crash", "diverged"):
            code = 4 if outcome == "diverged" else 1
            ledger.write(job, "ended", **{**ended, "code": code}, status="failed")
        else:
            ledger.write(job, "ended", **{**ended, "code": 75}, status="pruned")
            if outcome == "revived":
                ledger.write(job, "started", gpus=[], on_cpu=True, on="local")
                running.append(job)
    assert len(ledger.jobs) == 60
    assert len({job.words for job in ledger.jobs}) == 60
    assert {job.status for job in ledger.jobs} >= {"done", "pruned", "failed", "running"}


def test_a_point_depends_on_what_is_known_and_on_the_seed() -> None:
    def with_values(values: list[float], seed: int = 0) -> Point:
        jobs: list[Job] = []
        search = searching("tpe", 30, seed)
        for value in values:
            point = search.next_point(jobs)
            assert point is not None
            job = Job(len(jobs), str(len(jobs)), words_of(point))
            job.status, job.value = "done", value
            jobs.append(job)
        point = search.next_point(jobs)
        assert point is not None
        return point

    rising = [float(value) for value in range(12)]
    assert with_values(rising) == with_values(rising)
    assert with_values(rising) != with_values(rising[::-1])
    assert with_values(rising) != with_values(rising, seed=1)


@pytest.mark.parametrize("method", ["tpe", "cmaes"])
def test_what_is_pruned_teaches(method: str) -> None:
    """Small rates are pruned at a bad value, large ones at a good one: large ones are drawn, though no job is
    done."""
    search = Search(Sweep(search=method, trials=60), [RATE], FIXED)
    jobs: list[Job] = []
    rates = []
    while (point := search.next_point(jobs)) is not None:
        rate = float(point["optim.lr"])
        job = Job(len(jobs), str(len(jobs)), words_of(point))
        job.apply({"event": "evaluated", "step": 1, "steps": 9, "value": math.log10(rate), "metric": "m"})
        job.status = "pruned"
        jobs.append(job)
        rates.append(rate)
    assert sum(rate > 10**-2.5 for rate in rates[-20:]) >= 16


def test_what_diverged_is_avoided_and_other_failures_say_nothing() -> None:
    def failures(code: int) -> int:
        """How many of the last thirty end so."""
        search = Search(Sweep(search="tpe", trials=50), [RATE], FIXED)
        jobs: list[Job] = []
        while (point := search.next_point(jobs)) is not None:
            job = Job(len(jobs), str(len(jobs)), words_of(point))
            known = math.log10(float(point["optim.lr"]))  # the best are next to those that fail
            large = known > -2.5
            job.status, job.code, job.value = ("failed", code, None) if large else ("done", 0, known)
            jobs.append(job)
        return sum(job.status == "failed" for job in jobs[-30:])

    assert failures(4) <= 0.7 * failures(1)


@pytest.mark.parametrize("search", ["tpe", "random"])
def test_points_that_are_tried_are_not_tried_again(search: str) -> None:
    """A space of twelve, thirty trials: each once, and then it is over."""
    ranges: list[Range] = [
        Choice("a", ("x", "y", "'z, z'")),
        Numbers("b", 0, 3, whole=True, steps=("1", "2", "4", "8")),
    ]
    settings = Sweep(search=search, trials=30)
    points = [tuple(point.values()) for point, _ in tried(Search(settings, ranges, FIXED), lambda _: 0.0)]
    assert len(points) == len(set(points)) == 12


def test_only_points_of_the_ranges_and_of_the_same_line_count() -> None:
    search = searching("tpe", 30)
    inside = {"optim.lr": "1e-3", "data.mix": "0.5", "model.activation": "gelu", "model.width": "64"}
    outside = [
        {**inside, "optim.lr": "1.0"},
        {**inside, "model.width": "wide"},
        {**inside, "data.mix": "nan"},
    ]
    lines = [words_of(inside), words_of(dict(reversed(inside.items()))), *map(words_of, outside)]
    lines += [("recipe=y", *words_of(inside)[1:]), words_of(inside)[1:], (*words_of(inside), "seed=1")]
    jobs = [Job(number, str(number), words) for number, words in enumerate(lines)]
    assert [job.number for job, _ in search.points(jobs)] == [0, 1]
    jobs[4].also.append(words_of({**inside, "data.mix": "0.25"}))
    assert [job.number for job, _ in search.points(jobs)] == [0, 1, 4]


def sweep_point(folder: Path, point: Point, program: str = "", trust: str = "") -> SweepPoint:
    sweep = Sweep(search="random", trials=5, dry_run=True, dir=str(folder))
    nodes = {"task": {}, "data": {}, "optim": dict(point), "sched": {}, "strategy": {}}
    config = Config(recipe="x", device="cpu", sweep=sweep, **nodes)  # type: ignore[arg-type]
    return SweepPoint(config, (*([f"--trust={trust}"] if trust else []), *words_of(point)), program)


def test_points_of_another_recipe_or_program_do_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger(tmp_path)
    for rate in ("0.001", "0.01"):
        made = sweep_point(tmp_path, {"optim.lr": rate, "data.mix": "0.5", "model.activation": "gelu"}, "a")
        job = ledger.job(job_key(made.config, made.program), made.words)
        ledger.write(job, "ended", status="done", code=0, why="", seconds=1.0, metric="accuracy", value=0.5)
    for program, before in (("a", 2), ("b", 0)):
        SweepRunner().search(SEARCHES["random"], partial(sweep_point, tmp_path, program=program))
        plan = capsys.readouterr().out
        assert f"5 points by random, {before} of them asked for before" in plan
        assert "002  new" in plan


def test_a_known_job_runs_with_the_words_of_the_line_that_asks_for_it_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another --trust is no other job; without it this one could not be built."""
    point = {"optim.lr": "0.1"}
    without, trusting = sweep_point(tmp_path, point), sweep_point(tmp_path, point, trust="mine")
    ledger, key = Ledger(tmp_path), job_key(without.config)
    job = ledger.job(key, without.words)
    SweepRunner().run([trusting])
    assert "--trust=mine" in capsys.readouterr().out
    assert ledger.job(key, trusting.words) is job
    (read,) = read_ledger(tmp_path, live=True)
    for known in (job, read):
        assert (known.words, known.also) == (trusting.words, [without.words])
    ledger.job(key, without.words)
    assert (job.words, job.also) == (without.words, [trusting.words])


def test_several_objectives_are_sought_together() -> None:
    """Accuracy and seconds both rise with the width; a mix of 0.3 is best for both, at any width."""

    def off(search: str) -> tuple[float, int]:
        """How far from the best mix the last forty points are on average, and how many widths they have."""
        settings = Sweep(search=search, trials=80, objectives={"accuracy": "max", "seconds": "min"})
        two_objectives = Search(settings, [WIDTH, MIX], FIXED)
        jobs: list[Job] = []
        while (point := two_objectives.next_point(jobs)) is not None:
            width, lost = int(point["model.width"]), abs(float(point["data.mix"]) - 0.3)
            job = Job(len(jobs), str(len(jobs)), words_of(point), status="done")
            job.results = {"accuracy": math.log(width) - 4 * lost, "seconds": width * math.exp(4 * lost)}
            jobs.append(job)
        last = [point for _, point in two_objectives.points(jobs)][-40:]
        mixes = [abs(float(point["data.mix"]) - 0.3) for point in last]
        return sum(mixes) / len(mixes), len({point["model.width"] for point in last})

    (tpe, widths), (uniform, _) = off("tpe"), off("random")
    assert tpe < 0.6 * uniform
    assert widths > 10


def test_an_objective_that_no_job_has_is_named() -> None:
    with pytest.raises(UserError, match=r"job 000 has no accuracy; it has acuracy\."):
        searching("tpe", 50, objectives={"accuracy": "max"}).next_point(
            [Job(0, "0", words_of({"optim.lr": "0.01", "data.mix": "0.5", "model.activation": "gelu",
                                   "model.width": "8"}), status="done", results={"acuracy": 1.0})]
        )  # fmt: skip


def test_jobs_of_two_metrics_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Not an accuracy with a loss, which is better the lower."""
    jobs = []
    for number, metric in enumerate(("accuracy", "loss")):
        point = {"optim.lr": f"0.0{number + 1}", "data.mix": "0.5", "model.activation": "gelu"}
        jobs.append(Job(number, str(number), words_of(point), status="done", metric=metric, value=0.5))
    message = r"the jobs' best metrics are accuracy, loss, which can't be compared\. Name one"
    with pytest.raises(UserError, match=message):
        searching("random", 50).next_point(jobs)
    print_table(jobs)
    table = capsys.readouterr().out
    assert "accuracy 0.5000" in table
    assert "loss 0.5000" in table


@given(st.floats(1e-300, 1e300), st.integers(-(10**9), 10**9))
def test_numbers_come_through_hydra_as_they_were_written(number: float, whole: int) -> None:
    wide = Numbers("x", 1e-300, 1e300)
    text = wide.write(number)
    (override,) = parsed([f"x={text}"])
    assert type(override.value()) is float
    assert override.value() == wide.read(text) == pytest.approx(number, rel=1e-5)
    whole_text = Numbers("x", -(10**9), 10**9, whole=True).write(whole)
    (override,) = parsed([f"x={whole_text}"])
    assert override.value() == whole
    assert type(override.value()) is int


@pytest.mark.parametrize(("search", "most"), [("tpe", 1.0), ("random", 1.0), ("cmaes", 1.0)])
def test_a_thousand_points_are_known_at_once(tmp_path: Path, search: str, most: float) -> None:
    """Reading the ledger and asking for the next point."""
    ledger = tmp_path / "ledger.jsonl"
    dice = random.Random(0)
    lines = []
    for number in range(1000):
        point = {"optim.lr": f"{10 ** dice.uniform(-4, -1):.6g}", "data.mix": f"{dice.random():.6g}"}
        point |= {"model.activation": dice.choice(ACTIVATION.texts)} if search != "cmaes" else {}
        point |= {"model.width": str(dice.randint(8, 512))} if search != "random" else {}
        words = '", "'.join(words_of(point))
        lines.append(f'{{"event": "job", "job": {number}, "key": "{number}", "words": ["{words}"]}}')
        lines.append(
            f'{{"event": "ended", "job": {number}, "status": "done", "code": 0, "why": "", "seconds": 1,'
            f' "value": {known_surface(point)}, "metric": "m", "higher_is_better": true}}'
        )
    ledger.write_text("\n".join(lines) + "\n")
    searching(search, 2000).next_point([])  # imports
    began = time.process_time()  # others may use the machine, too
    jobs = read_ledger(tmp_path, live=False)
    read = time.process_time()
    point = searching(search, 2000).next_point(jobs)
    print(f"{search}: read {read - began:.3f} s, next point {time.process_time() - read:.3f} s")
    assert point is not None
    assert len(searching(search, 2000).points(jobs)) == 1000
    assert time.process_time() - read < 5 * most


ASKS = ["train.epochs=1", "sweep.max_parallel=1", "sweep.search=tpe"]


def words_of_jobs(cwd: Path) -> list[list[str]]:
    """The words of each job, in the order in which they were asked for."""
    return [event["words"] for event in events(cwd, "job")]


def searched(cwd: Path, words: list[str], kill_after: int | None = None) -> str:
    """What a sweep in this folder printed; killed -9 in the middle of this job, and started again."""
    cwd.mkdir(exist_ok=True)
    job = start(cwd, swept_words(*words))
    if kill_after is not None:
        while job.process.poll() is None and not started(cwd, kill_after):
            time.sleep(0.05)
        time.sleep(1)
        job.kill(job.process.pid, signal.SIGKILL)
        job.wait(60)
        assert len(words_of_jobs(cwd)) == kill_after + 1
        job = start(cwd, swept_words(*words))
    assert job.wait(250) == 0, job.text
    return job.text


def started(cwd: Path, number: int) -> bool:
    path = cwd / "sweep/ledger.jsonl"
    return path.exists() and any(event["job"] == number for event in events(cwd, "started"))


@pytest.mark.long
def test_a_killed_search_asks_for_the_points_that_it_would_have_asked_for(tmp_path: Path) -> None:
    """Real jobs, and a kill -9 while points are drawn at random, and while TPE has learnt."""
    words = [*ASKS, "sweep.trials=7", "optim.lr=tag(log,interval(1e-3,1))"]
    searched(tmp_path / "whole", words)
    searched(tmp_path / "early", words, kill_after=1)
    searched(tmp_path / "late", words, kill_after=5)
    whole = words_of_jobs(tmp_path / "whole")
    assert len(whole) == 7
    assert words_of_jobs(tmp_path / "early") == words_of_jobs(tmp_path / "late") == whole
    for folder in ("early", "late"):
        assert set(statuses(tmp_path / folder).values()) == {"done"}
        killed = [event["job"] for event in events(tmp_path / folder, "started")]
        assert len(killed) == 8


@pytest.mark.long
def test_tpe_beats_random_with_real_jobs(tmp_path: Path) -> None:
    """Fifteen points each, of which the best is known: TPE's best is nearer, and so are its last eight."""
    words = ["train.epochs=1", "optim.lr=0.1", "sweep.max_parallel=1", "sweep.trials=15", "task.best=300"]
    words.append("task.point=int(interval(0,1000))")
    far = {}
    for search in ("tpe", "random"):
        searched(tmp_path / search, [*words, f"sweep.search={search}"])
        tried = [int(job[-1].partition("=")[2]) for job in words_of_jobs(tmp_path / search)]
        far[search] = sorted(abs(point - 300) for point in tried[-8:])
    print(far)
    assert far["tpe"][0] <= far["random"][0]
    assert sum(far["tpe"]) < sum(far["random"])


@pytest.mark.long
def test_pruning_and_search_and_report_work_together(tmp_path: Path) -> None:
    """ASHA promotes among the points so far, and draws a new one where none is to be promoted; and the report
    has a picture."""
    words = ["sweep.search=tpe", "sweep.trials=8", "sweep.prune=asha", "sweep.max_parallel=2"]
    words += ["optim.lr=tag(log,interval(1e-2,1))", "task.point=choice(0,1,2,3)"]
    searched(tmp_path, words)
    jobs = read_ledger(tmp_path / "sweep", live=False)
    assert len(jobs) == 8
    assert {job.status for job in jobs} == {"done", "pruned"}
    steps = sum(job.step for job in jobs)
    print(f"{steps} of {8 * 54} steps")
    assert steps <= 0.6 * 8 * 54
    done = ddptrain(tmp_path, "report sweep")
    assert done.code == 0, done.err
    assert "importance" not in done.out  # eight jobs are too few to tell
    assert (tmp_path / "sweep/plots/parallel.png").read_bytes().startswith(b"\x89PNG")
    assert "Settings and results" in (tmp_path / "sweep/report.html").read_text()


@pytest.mark.long
def test_a_search_with_failures_ends_and_several_objectives_are_in_the_table(tmp_path: Path) -> None:
    words = [
        "train.epochs=1",
        "sweep.search=tpe",
        "sweep.trials=7",
        "task.point=range(5)",
        "task.failing=[4]",
    ]
    words += ["sweep.objectives={loss:min,samples_per_s:max}", "optim.lr=choice(0.1,0.2)"]
    job = start(tmp_path, swept_words(*words))
    assert job.wait(250) == 1, job.text
    jobs = read_ledger(tmp_path / "sweep", live=False)
    assert len(jobs) == 7
    assert {job.status for job in jobs} == {"done", "failed"}
    shown = ddptrain(tmp_path, "report sweep").out
    assert "; * best: loss min, samples_per_s max" in shown
    best = [line for line in shown.splitlines() if line.strip()[3:5] == " *"]
    assert 1 <= len(best) < 6


def test_the_plan_of_a_search_shows_ranges_and_first_points_and_imports_no_torch(tmp_path: Path) -> None:
    words = f"{TYPED} optim.lr=tag(log,interval(1e-4,1e-1)) task.point=range(1,9) optim.nesterov=true,false"
    words += " optim.momentum=0.5 optim.weight_decay=interval(0,0.1) sweep.gpus=[0,1,2]"
    ended, imported = with_imports(tmp_path, f"{words} sweep.search=tpe sweep.trials=30 sweep.dry_run=true")
    assert ended.code == 0, ended.err
    first, *lines = ended.out.splitlines()
    assert first.startswith("sweep sweep: 30 points by tpe, 0 of them asked for before; slots 0, 1, 2")
    assert lines[:4] == [
        "optim.lr: from 0.0001 to 0.1, by their logarithm",
        "task.point: 8 values from 1 to 8",
        "optim.nesterov: True, False",
        "optim.weight_decay: from 0.0 to 0.1",
    ]
    assert [line[:13] for line in lines[4:]] == ["000  new     ", "001  new     ", "002  new     "]
    assert not [name for name in imported if name.partition(".")[0] == "torch"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("optim.lr=interval(1e-4,1e-1)", "sweep.search=tpe sweep.trials=30"),
        ("optim.lr=interval(1e-4,1e-1) sweep.search=tpe", "sweep.trials=30"),
        ("optim.lr=0.1,0.2 sweep.trials=3", "sweep.trials=3: is for a search"),
        ("optim.lr=0.1 sweep.search=tpe sweep.trials=3", "no range to search"),
        ("optim.lr=0.1,0.2 sweep.search=tp sweep.trials=3", "Did you mean tpe?"),
        ("optim.lr=interval(1,1) sweep.search=tpe sweep.trials=3", "to a larger one"),
        ("optim.lr=tag(log,interval(0,1)) sweep.search=tpe sweep.trials=3", "begins above 0"),
        ("optim.lr=tag(exp,interval(0,1)) sweep.search=tpe sweep.trials=3", "the one tag is log"),
        ("task.point=range(0) sweep.search=tpe sweep.trials=3", "empty list"),
        ("train.batch_size=interval(1,8) sweep.search=tpe sweep.trials=3", "must be a whole number"),
        ("train.batch_size=int(interval(0,8)) sweep.search=tpe sweep.trials=3", "train.batch_size=0"),
        ("optim=sgd,adamw sweep.search=cmaes sweep.trials=3", "sweep.search=cmaes searches numbers"),
        ("sweep.retries=1,2 sweep.search=tpe sweep.trials=3", "sweep.retries: says how"),
        (
            "optim.lr=0.1,0.2 sweep.objectives={loss:least}",
            "sweep.objectives={'loss': 'least'}: must say max or min",
        ),
        (
            "optim.lr=interval(0,1) sweep.search=cmaes sweep.trials=3 sweep.objectives={loss:min,a:max}",
            "takes one objective",
        ),
    ],
)
def test_a_wrong_search_is_refused_before_a_job_starts(tmp_path: Path, words: str, named: str) -> None:
    assert named in early_refusal(tmp_path, f"{TYPED} {words}")


def test_without_optuna_a_search_says_what_to_install(tmp_path: Path) -> None:
    words = f"{TYPED} optim.lr=interval(0.1,1) sweep.search=tpe sweep.trials=3"
    message = refusal(tmp_path, words, **hide_optuna(tmp_path / "hidden"))
    assert "sweep.search=tpe: needs optuna: pip install 'ddptrain[optuna]'" in message


def test_a_grid_needs_no_optuna(tmp_path: Path) -> None:
    words = f"{TYPED} optim.lr=0.1,0.2 task.point=1 train.epochs=1 sweep.prune=asha"
    ended = ddptrain(tmp_path, words, **hide_optuna(tmp_path / "hidden"))
    assert ended.code == 0, ended.err
    assert set(statuses(tmp_path).values()) == {"done"}


def test_a_point_that_is_refused_is_noted_and_the_search_goes_on(tmp_path: Path) -> None:
    """Values that can't go together; the jobs that run are not disturbed, and nothing is tried twice."""
    words = swept_words(
        "sweep.search=random", "sweep.trials=5", "sched=wsd", "sched.warmup=interval(0,0.9)",
        "sched.cooldown=interval(0,0.9)", "train.steps=2", "sweep.max_parallel=1",
    )  # fmt: skip
    for _ in range(2):
        job = start(tmp_path, words)
        assert job.wait() == 1, job.text
        ended = events(tmp_path, "ended")
        assert len(ended) == 5
        assert {event["status"] for event in ended} == {"done", "failed"}
        for event in ended:
            assert ("it is longer than the run" in event["why"]) == (event["status"] == "failed")
