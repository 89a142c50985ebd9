"""Common beginnings of a sweep's jobs: trained once, and only where they are the same training."""

import random
import signal
import time
from pathlib import Path

import pytest
from branches import outcomes, shared, start, swept, trained_steps
from sweeps import events, statuses

ONE = "train.steps=30,40"
TWO = ("sched=wsd", "sched.cooldown=0.25,0.5")
PAIRS: dict[str, tuple[list[str], int | None]] = {
    # two jobs, and the steps that they share; None: it turns out while they train that there are none
    "read by name": ([ONE, "task.reads=name"], None),
    "unpacked": ([ONE, "task.reads=unpacked"], None),
    "by index": ([ONE, "task.reads=index"], None),
    "in a slice": ([ONE, "task.reads=slice"], None),
    "spread over arguments": ([ONE, "task.reads=spread"], None),
    "matched": ([ONE, "task.reads=matched"], None),
    "read late": ([ONE, "task.reads=name", "task.since=24"], None),
    "read after the branch": ([ONE, "task.reads=name", "task.since=32"], 29),
    "read by rank 1": ([ONE, "task.reads=name", "task.rank=1", "sweep.gpus_per_job=2"], None),
    "read, of the same length": ([*TWO, "task.reads=name"], 21),
    "by the data": ([ONE, "data._target_=branching.Points", "data.fading=true"], 0),
    "by data that does not say": ([ONE, "data._target_=branching.Points"], 0),
    "length in the task": ([ONE, "task.note=${train.steps}"], 0),
    "length in the data": ([ONE, "data.note=${train.steps}"], 0),
    "schedule in the optimizer": (["optim.weight_decay=${sched.cooldown}", "sched.cooldown=0.1,0.2"], 0),
    "folder in the task": ([ONE, "task.note=${run.dir}"], None),
    "thaws": (["freeze=[0.*]", "thaw=0.3,0.6"], 12),
    "never thaws": (["freeze=[0.*]", "thaw=null,0.6"], 0),
    "onecycle": ([ONE, "sched=onecycle"], 0),
    "cosine": ([ONE, "sched=cosine"], 0),
    "warm-up as a share": ([ONE, "sched=wsd", "sched.warmup=0.2"], 0),
    "milestones": (["sched=step", "sched.milestones=[0.5],[0.75]"], 20),
    "rates that end apart": (["sched=linear,cosine", "sched.final=1"], 39),
    "epochs": (["train.steps=null", "train.epochs=3,4"], 29),
    "averages": ([*TWO, "ema.decay=0.9"], 21),
    "other averages": (["ema.decay=0.9,0.99"], 0),
    "early stop": ([ONE, "stop.patience=20"], 0),
    "a controller": ([ONE, "+controllers.mine={_target_: branching.Patient}"], 0),
    "evaluated at the branch": ([*TWO, "train.eval_every=7"], 21),
    "evaluated at other steps": (["train.eval_every=7,9"], 0),
    "steps left out": ([*TWO, "task.lost=5", "train.nonfinite=skip"], 21),
    "accumulated": ([*TWO, "train.micro_batch=3"], 21),
}


@pytest.mark.long
@pytest.mark.parametrize("pair", PAIRS)
def test_two_jobs_share_what_is_the_same_and_no_more(pair: str, tmp_path: Path) -> None:
    """Whatever they share, all files are those of separate runs, to the byte."""
    words, steps = PAIRS[pair]
    together = swept(tmp_path / "together", *words)
    apart = swept(tmp_path / "apart", *words, "sweep.share=false")
    assert list(shared(together).values()) == [steps] * bool(steps)
    assert len(events(together, "not shared")) == (steps is None)
    assert trained_steps(apart) - trained_steps(together) == (steps or 0)
    ours, theirs = outcomes(together), outcomes(apart)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


GRID = ("sched=wsd", "sched.cooldown=0.1,0.2,0.3,0.4", "train.steps=60,80,100", "train.eval_every=15")


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The twelve jobs by themselves."""
    return swept(tmp_path_factory.mktemp("separate"), *GRID, "sweep.share=false")


@pytest.mark.long
def test_twelve_jobs_take_forty_percent_of_the_steps(tmp_path: Path, separate: Path) -> None:
    together = swept(tmp_path, *GRID)
    share = trained_steps(together) / trained_steps(separate)
    print(f"{trained_steps(together)} of {trained_steps(separate)} steps: {share:.3f}")
    assert trained_steps(separate) == 4 * (60 + 80 + 100)
    assert share <= 0.4
    assert trained_steps(separate) - trained_steps(together) == sum(shared(together).values())
    ours, theirs = outcomes(together), outcomes(separate)
    assert ours.keys() == theirs.keys()
    assert len({name.partition("/")[0] for name in ours}) == 12
    assert [name for name in ours if ours[name] != theirs[name]] == []


@pytest.mark.long
def test_with_two_ranks_a_job(tmp_path: Path) -> None:
    words = (*TWO, "train.steps=40,50", "ema.decay=0.9", "sweep.gpus_per_job=2")
    together = swept(tmp_path / "together", *words)
    apart = swept(tmp_path / "apart", *words, "sweep.share=false")
    assert len(shared(together)) == 3
    ours, theirs = outcomes(together), outcomes(apart)
    assert [name for name in ours if ours[name] != theirs[name]] == []


@pytest.mark.long
def test_a_sweep_that_is_stopped_trains_no_step_twice(tmp_path: Path, separate: Path) -> None:
    for seconds in (12, 30):
        job = start(tmp_path, *GRID)
        time.sleep(seconds)
        job.kill(job.process.pid, signal.SIGTERM)
        assert job.wait() == 75, job.text
    swept(tmp_path, *GRID)
    assert trained_steps(tmp_path) == 319
    ours, theirs = outcomes(tmp_path), outcomes(separate)
    assert [name for name in ours if ours[name] != theirs[name]] == []


@pytest.mark.faults
@pytest.mark.parametrize("turn", range(10))
def test_a_sweep_killed_at_any_moment_has_the_same_outcome(turn: int, tmp_path: Path, separate: Path) -> None:
    """And nothing is trained twice but what came after a last checkpoint."""
    dice = random.Random(turn)
    for _ in range(3):
        first = start(tmp_path, *GRID)
        time.sleep(dice.uniform(4, 25))
        first.kill(first.process.pid)
        first.process.wait()
        until = time.monotonic() + 5
        while first.pids() and time.monotonic() < until:
            time.sleep(0.1)
        assert first.pids() == [], "jobs outlive their sweep"
    swept(tmp_path, *GRID)
    assert set(statuses(tmp_path).values()) == {"done"}
    assert not list((tmp_path / "sweep").glob("*/.shared"))
    ours, theirs = outcomes(tmp_path), outcomes(separate)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


@pytest.mark.long
def test_where_the_trunk_fails_the_others_go_on_without_it(tmp_path: Path) -> None:
    """Each fails at its own half: the first one before another would branch off at two thirds."""
    words = ("sched=wsd", "sched.cooldown=0.1", "train.steps=40,60,80", "checkpoint.every=10")
    job = start(tmp_path, *words, "task.failing=40", "sweep.retries=1")
    assert job.wait() == 1, job.text
    assert statuses(tmp_path) == {0: "done", 1: "failed", 2: "failed"}
    found = events(tmp_path, "shared")
    assert [(event["job"], event["trunk"], event["step"]) for event in found] == [(1, 0, 37), (2, 1, 40)]


def test_the_plan_says_what_is_saved(tmp_path: Path) -> None:
    plan = start(tmp_path, *GRID, "sweep.dry_run=true")
    assert plan.wait() == 0
    assert "641 of 960 steps are trained once for several jobs (sweep.share)" in plan.text
    assert not (tmp_path / "sweep").exists()
    # a branch has not spent the seconds of what it shares
    plan = start(tmp_path, *GRID, "sweep.dry_run=true", "sweep.objectives={error:min,seconds:min}")
    assert plan.wait() == 0
    assert "are trained once" not in plan.text


@pytest.mark.long
def test_the_plan_says_why_nothing_is_saved(tmp_path: Path) -> None:
    for word in ("sweep.share=false", "sweep.prune=asha"):
        plan = start(tmp_path, *GRID, "sweep.dry_run=true", word)
        assert plan.wait() == 0
        assert "are trained once" not in plan.text
    words = ("train.epochs=1,2", "train.steps=null", "data._target_=branching.Missing")
    plan = start(tmp_path, *words, "sweep.dry_run=true")
    assert plan.wait() == 0
    assert "note  no steps are shared: data: there is none" in plan.text
