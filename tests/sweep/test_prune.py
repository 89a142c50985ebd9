"""Pruning: the rules by themselves, and a real sweep that finds the best point with half of the work."""

import itertools
import json
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import events, points, start, statuses, swept_words

from ddptrain.api.observer import Evaluated
from ddptrain.api.timing import Timing
from ddptrain.tools.sweep import pruning
from ddptrain.tools.sweep.ledger import Evaluation, Job, Ledger, read_ledger
from ddptrain.tools.sweep.pruning_requests import ANSWERS, PruningRequests
from ddptrain.tools.sweep.pruning_rules import Asha, Median, PruningRule

EPOCHS = 9


def simulated(
    rule: PruningRule, finals: list[float], slots: int, dice: random.Random, losses: int = 0
) -> tuple[list[Job], float]:
    """The jobs after a sweep of one evaluation an epoch, in which they advance in any order, and the share
    of the grid's epochs that were trained. A job's metric only rises, and never crosses another's.
    losses: of so many, the first ones, it is another one, which is far below."""
    jobs = [Job(number, str(number), ()) for number in range(len(finals))]
    waiting, running, epochs = list(jobs), dict[int, int](), 0
    at = dict.fromkeys(range(len(jobs)), 0)
    while True:
        while len(running) < slots:
            able = waiting[:1] or rule.revivable(jobs, idle=not running)[:1]
            if not able:
                break
            [job], waiting = able, waiting[1:]
            if job.evaluations:
                job.apply({"event": "promoted", "share": job.evaluations[-1].share})
            job.status, running[job.number] = "running", at[job.number]
        if not running:
            return jobs, epochs / (EPOCHS * len(jobs))
        job = jobs[dice.choice(sorted(running))]
        at[job.number] += 1
        epochs += 1
        share = at[job.number] / EPOCHS
        is_loss = job.number < losses
        job.metric = "loss" if is_loss else "accuracy"
        job.evaluations.append(Evaluation(share, finals[job.number] * share - 100 * is_loss))
        goes_on = rule.goes_on(job, jobs, waiting=bool(waiting))
        job.apply({"event": "verdict", "share": share, "goes_on": goes_on})
        if share == 1 or not goes_on:
            job.status = "done" if share == 1 else "pruned"
            del running[job.number]


@settings(max_examples=300, deadline=None)
@given(
    finals=st.lists(st.floats(0.01, 1), min_size=1, max_size=30, unique=True),
    slots=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_asha_brings_the_best_to_the_end(finals: list[float], slots: int, seed: int) -> None:
    """In whatever order jobs come and advance; and all that is pruned has been given its first rung."""
    jobs, share = simulated(Asha(3, 2), finals, slots, random.Random(seed))
    best = finals.index(max(finals))
    assert jobs[best].status == "done"
    assert all(job.evaluations for job in jobs)
    assert {job.status for job in jobs} <= {"done", "pruned"}
    if len(jobs) >= 9:
        assert share <= 0.5 + slots / len(jobs)


@settings(max_examples=100, deadline=None)
@given(
    finals=st.lists(st.integers(1, 100).map(lambda final: final / 100), min_size=6, max_size=30, unique=True),
    losses=st.integers(3, 27),
    slots=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_jobs_of_two_metrics_are_not_compared(
    finals: list[float], losses: int, slots: int, seed: int
) -> None:
    """The best of each gets to the end."""
    losses = min(losses, len(finals) - 3)
    jobs, _ = simulated(Asha(3, 1), finals, slots, random.Random(seed), losses)
    for part in (jobs[:losses], jobs[losses:]):
        best = max(part, key=lambda job: finals[job.number])
        assert best.status == "done"
    median = Median(1 / 9)
    for job in jobs:
        alike = [other for other in jobs if other.metric == job.metric]
        assert median.goes_on(job, jobs, False) == median.goes_on(job, alike, False)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10000), ascending=st.booleans())
def test_asha_takes_a_third_of_the_grid(seed: int, ascending: bool) -> None:
    """27 jobs on 4 slots: at rungs of 1 and 3 of 9 epochs a synchronous halving trains 27 + 9 * 2 + 3 * 6
    = 63 of 243 epochs (26 %); that jobs don't wait for each other costs some. Even where each is better than
    the one before, which makes the published algorithm promote almost all."""
    dice = random.Random(seed)
    finals = [0.3 + 0.02 * place for place in range(27)]
    if not ascending:
        dice.shuffle(finals)
    _, share = simulated(Asha(3, 2), finals, 4, dice)
    assert 63 / 243 - 1e-9 <= share <= 0.42


@settings(max_examples=200, deadline=None)
@given(
    finals=st.lists(st.floats(0.01, 1), min_size=1, max_size=30, unique=True),
    slots=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_the_median_rule_never_ends_the_best(finals: list[float], slots: int, seed: int) -> None:
    jobs, _ = simulated(Median(1 / 9), finals, slots, random.Random(seed))
    assert jobs[finals.index(max(finals))].status == "done"


def test_the_median_rule_by_hand() -> None:
    """Means up to the half: 0.2, 0.4, 0.6; their median is 0.4, and a best value of 0.3 is below it."""
    others = [Job(n, str(n), ()) for n in range(3)]
    for job, values in zip(others, [(0.1, 0.3), (0.3, 0.5), (0.5, 0.7)], strict=True):
        job.evaluations += [Evaluation(0.25, values[0]), Evaluation(0.5, values[1])]
    late = Job(3, "3", ())
    late.evaluations += [Evaluation(0.25, 0.3), Evaluation(0.5, 0.1)]
    rule = Median(1 / 9)
    assert not rule.goes_on(late, [*others, late], waiting=True)
    late.evaluations[0] = Evaluation(0.25, 0.4)
    assert rule.goes_on(late, [*others, late], waiting=True)
    assert rule.goes_on(late, [*others[:2], late], waiting=True), "two others are too few"
    late.evaluations[:] = [Evaluation(0.05, -9.0)]
    assert rule.goes_on(late, [*others, late], waiting=True), "too early"


def test_what_is_no_number_is_worst() -> None:
    jobs = [Job(n, str(n), ()) for n in range(3)]
    for job, value in zip(jobs, (float("nan"), -5.0, -7.0), strict=True):
        job.evaluations.append(Evaluation(1 / 3, value))
    verdicts = [Asha(3, 2).goes_on(job, jobs, waiting=False) for job in jobs]
    assert verdicts == [False, True, False]


def one_sweep(cwd: Path, seed: int, ranks: int) -> None:
    """Nine points, nine epochs each; the best is neither first nor last."""
    best = 2 + seed
    words = swept_words(
        "task.point=range(9)", f"task.best={best}", f"seed={seed}", "sweep.prune=asha",
        "sweep.gpus=[0,1,2,3]", f"sweep.gpus_per_job={ranks}",
    )  # fmt: skip
    job = start(cwd, words)
    assert job.wait(280) == 0, job.text
    assert job.pids() == []
    done = {event["job"]: event["value"] for event in events(cwd, "ended") if event["status"] == "done"}
    winner = min(done, key=lambda number: done[number])
    assert points(cwd)[winner] == str(best)
    summaries = [cwd / "sweep" / f"{number:03}" / "summary.json" for number in range(9)]
    trained = sum(json.loads(summary.read_text())["step"] for summary in summaries)
    print(f"seed {seed}, {ranks} ranks: {trained / (9 * 54):.3f} of the grid's epochs")
    assert trained <= 0.5 * 9 * 54
    # where a rank had gone on after the others stopped, the job had crashed or hung
    assert set(statuses(cwd).values()) <= {"done", "pruned"}
    for event in events(cwd, "ended"):
        assert event["code"] == (0 if event["status"] == "done" else 75)
    verdicts = [event for event in events(cwd, "verdict") if not event["goes_on"]]
    assert len(verdicts) == sum(event["status"] == "pruned" for event in events(cwd, "ended"))


@pytest.mark.faults
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_asha_finds_the_best_with_half_of_the_epochs(seed: int, ranks: int, tmp_path: Path) -> None:
    one_sweep(tmp_path, seed, ranks)


@pytest.mark.long
def test_the_pruned_go_on_where_nothing_is_pruned_any_more(tmp_path: Path) -> None:
    """With two ranks a job, which stop together and go on together."""
    words = swept_words("task.point=range(3)", "sweep.gpus=[0,1,2,3]", "sweep.gpus_per_job=2")
    assert start(tmp_path, [*words, "sweep.prune=asha"]).wait() == 0
    assert statuses(tmp_path) == {0: "done", 1: "pruned", 2: "pruned"}
    assert {event["code"] for event in events(tmp_path, "ended") if event["job"] > 0} == {75}
    assert start(tmp_path, words).wait() == 0
    assert set(statuses(tmp_path).values()) == {"done"}
    assert "resumed    " in (tmp_path / "sweep/002/output.txt").read_text()


@pytest.mark.long
def test_an_evaluation_that_is_repeated_after_a_kill_is_judged_once(tmp_path: Path) -> None:
    """The last job had passed its first one, beside jobs that had got less far, when the sweep was killed."""
    words = swept_words("task.point=0,1,2,8", "task.best=0", "sweep.prune=median", "sweep.max_parallel=1")
    assert start(tmp_path, words).wait() == 0
    assert statuses(tmp_path) == {0: "done", 1: "done", 2: "done", 3: "pruned"}
    last = [event for event in events(tmp_path) if event.get("job") == 3]
    assert [event["event"] for event in last[-2:]] == ["verdict", "ended"]
    before = [event for event in events(tmp_path) if event not in last[-2:]]
    lines = [json.dumps(event) + "\n" for event in (*before, {**last[-2], "goes_on": True})]
    (tmp_path / "sweep/ledger.jsonl").write_text("".join(lines))
    shutil.rmtree(tmp_path / "sweep/003/checkpoints")
    assert start(tmp_path, words).wait() == 0
    assert statuses(tmp_path)[3] == "pruned"
    assert [event["goes_on"] for event in events(tmp_path, "verdict") if event["job"] == 3] == [
        True,
        True,
        False,
    ]


def test_a_job_that_runs_again_has_no_error_of_its_last_attempt() -> None:
    job = Job(0, "key", ())
    started = {"event": "started", "time": 1.0, "on": "local", "gpus": [], "on_cpu": True}
    job.apply(started)
    job.apply({"event": "ended", "status": "failed", "code": 2, "why": "no data", "seconds": 1.0})
    assert (job.status, job.why) == ("failed", "no data")
    job.apply(started)
    assert (job.status, job.why) == ("running", "")


def test_a_sweep_killed_before_it_starts_a_promoted_job_starts_it_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    job = ledger.job("key", ("task.point=0",))
    ledger.write(job, "started", on="local", gpus=[], on_cpu=True)
    facts = {"metric": "loss", "higher_is_better": False, "step": 6, "steps": 54}
    ledger.write(job, "evaluated", value=0.5, **facts)
    ledger.write(job, "verdict", share=1 / 9, goes_on=False)
    ledger.write(job, "ended", status="pruned", code=75, why="", seconds=1.0)
    ledger.write(job, "promoted", share=1 / 9)
    (again,) = read_ledger(tmp_path, live=False)
    assert again.status == "stopped"


def test_a_job_whose_folder_is_deleted_needs_no_answer(tmp_path: Path) -> None:
    requests = PruningRequests(tmp_path / "job")
    requests.answer(True)
    assert (tmp_path / "job" / ANSWERS).read_text() == '{"goes_on": true}\n'
    shutil.rmtree(tmp_path / "job")
    requests.answer(True)
    assert not (tmp_path / "job").exists()


def test_a_job_waits_once_for_a_sweep_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again for one that is back: it answers all that it was asked meanwhile."""
    sweep, waits = PruningRequests(tmp_path), []
    clock = itertools.count()
    monkeypatch.setattr(pruning.time, "monotonic", lambda: 10.0 * next(clock))
    monkeypatch.setattr(pruning.time, "sleep", lambda seconds: waits.append(seconds))
    controller = pruning.Pruning(str(tmp_path))

    def goes_on(step: int) -> tuple[bool, bool]:
        """And whether it has waited."""
        waits.clear()
        return controller.goes_on(
            Evaluated(step, 1.0, 1, {"loss": 0.5}, {}, 0.1, False, Timing(), "loss", False, 9)
        ), bool(waits)

    assert goes_on(1) == (True, True)
    assert [goes_on(step) for step in (2, 3)] == [(True, False)] * 2
    for _ in sweep.unanswered():
        sweep.answer(True)
    assert goes_on(4) == (True, True), "the sweep is back, so that its answer is waited for"
