"""kill -9 of any rank or of the agent at any moment: the run ends with the same bits."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from running import Job, assert_same_outcome, faulty_words, kill_at_random
from texts import write_text

TRIALS = range(20)
PACE = "data.pace=0.04"
"""Seconds a batch: 40 steps take some two seconds, so that kills fall into them."""


@pytest.mark.faults
@pytest.mark.parametrize("trial", TRIALS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_killed_rank_costs_time_and_no_bit(
    tmp_path: Path, undisturbed: Callable[..., Path], ranks: int, precision: str, trial: int
) -> None:
    words = faulty_words(PACE, f"precision={precision}")
    dice = random.Random(f"rank {ranks} {precision} {trial}")
    for attempt in range(5):
        cwd = tmp_path / str(attempt)
        cwd.mkdir()
        job = Job(words, cwd, ranks, restarts=10)
        killed = kill_at_random(job, dice, seconds=2.5, kills=dice.choice([1, 1, 2]))
        assert job.wait() == 0, job.text[-3000:]
        if killed and "restart 1 of" in job.text:
            break
    else:
        pytest.fail("no kill met a living rank")
    assert_same_outcome(cwd / "run", undisturbed(ranks, *words))


@pytest.mark.faults
@pytest.mark.parametrize("trial", TRIALS)
def test_a_killed_agent_takes_all_with_it_and_the_same_command_goes_on(
    tmp_path: Path, undisturbed: Callable[..., Path], trial: int
) -> None:
    ranks = 2 + trial % 2
    words = faulty_words(PACE)
    dice = random.Random(f"agent {trial}")
    job = Job(words, tmp_path, ranks, restarts=3, launcher=("launch", "torchrun")[trial % 2])
    job.wait_for("plan       steps")
    time.sleep(dice.uniform(0, 2.0))
    job.kill(job.process.pid)
    job.process.wait()
    time.sleep(2.0)
    assert job.pids() == [], "no orphan after two seconds"
    again = Job(words, tmp_path, ranks, launcher=("launch", "torchrun")[trial % 2])
    assert again.wait() == 0, again.text[-3000:]
    assert_same_outcome(tmp_path / "run", undisturbed(ranks, *words))


TEXT = (
    "data=text data.source.path=text.txt data.window=16 model.width=32 model.layers=2 model.dropout=0.2"
    " model.ngram_rows=64 model.ngram_width=8 train.batch_size=12 ema.decay=0.9"
)
CALENDAR = "train.steps=30 train.eval_every=11 checkpoint.every=4 log.every=3 observers=[console,jsonl,plots]"
FAMILIES = {
    "lstm": f"recipe=lstm_text {TEXT}",
    "transformer": f"recipe=transformer_text {TEXT} model.heads=2",
    "detector": (
        "recipe=yolo_shapes data.source.train=32 data.source.valid=8 data.source.side=64 train.batch_size=9"
        " ema.decay=0.9 task.multi_scale=0.25"
    ),
}


@pytest.mark.faults
@pytest.mark.parametrize("trial", range(5))
@pytest.mark.parametrize("family", FAMILIES)
def test_each_recipe_family_on_three_ranks(
    tmp_path: Path, undisturbed: Callable[..., Path], family: str, trial: int
) -> None:
    """The carried state, the average, the mosaics: whatever a family has beside its weights."""
    write_text(tmp_path.parent / "text.txt")
    words = f"{FAMILIES[family]} {CALENDAR} strategy.bucket_cap_mb=0.02 run.dir=run".split()
    words = [word.replace("text.txt", str(tmp_path.parent / "text.txt")) for word in words]
    dice = random.Random(f"{family} {trial}")
    for attempt in range(5):
        cwd = tmp_path / str(attempt)
        cwd.mkdir()
        job = Job(words, cwd, 3, restarts=10)
        killed = kill_at_random(job, dice, seconds=3.0, kills=1)
        assert job.wait(400) == 0, job.text[-3000:]
        if killed and "restart 1 of" in job.text:
            break
    else:
        pytest.fail("no kill met a living rank")
    assert_same_outcome(cwd / "run", undisturbed(3, *words))


WORLDS = [3, 4, 1, 2]


@pytest.mark.faults
@pytest.mark.parametrize("trial", range(20))
def test_a_strict_run_keeps_its_bits_while_the_world_changes(
    tmp_path: Path, undisturbed: Callable[..., Path], trial: int
) -> None:
    words = faulty_words(PACE, "elastic=strict", "strategy.shards=4", "checkpoint.every=3")
    dice = random.Random(f"strict {trial}")
    for ranks in WORLDS[:-1]:
        job = Job(words, tmp_path, ranks)
        job.wait_for("plan       steps")
        time.sleep(dice.uniform(0.2, 1.0))
        job.kill(dice.choice([job.process.pid, *job.rank_pids().values()]))
        job.wait()
        time.sleep(0.5)
        job.end()
    job = Job(words, tmp_path, WORLDS[-1])
    assert job.wait() == 0, job.text[-3000:]
    assert_same_outcome(tmp_path / "run", undisturbed(2, *words))
