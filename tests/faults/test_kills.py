"""kill -9 of any rank or of the agent at any moment: the run ends with the same bits."""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from running import Job, assert_same_outcome, faulty_words, kill_at_random
from texts import write_text

TRIALS = range(20)
PACE = ["data.pace=0.04", "task.fault=sleep", "task.place=report", "task.seconds=0.3", "task.once=false"]
"""A batch and an evaluation take some time on every machine, so that a kill meets the steps that it is meant
for, and the run's end."""
STEPS, LAG = range(0, 41, 5), 0.2
"""Where kills fall: from a logged step on, 0 being the ranks' beginning, as far as the next one."""


@pytest.mark.faults
@pytest.mark.parametrize("trial", TRIALS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_killed_rank_costs_time_and_no_bit(
    tmp_path: Path, undisturbed: Callable[..., Path], ranks: int, trial: int
) -> None:
    words = faulty_words(*PACE, f"precision={('fp32', 'bf16')[trial % 2]}")
    dice = random.Random(f"rank {ranks} {trial}")
    kills = dice.choice([1, 1, 2])
    job = Job(words, tmp_path, ranks, restarts=10)
    assert kill_at_random(job, dice, STEPS, kills, LAG) == kills
    assert job.wait() == 0, job.text[-3000:]
    assert job.text.count(" of 10\n") == kills, job.text[-3000:]
    assert_same_outcome(tmp_path / "run", undisturbed(ranks, *words))


@pytest.mark.faults
@pytest.mark.parametrize("trial", TRIALS)
def test_a_killed_agent_takes_all_with_it_and_the_same_command_goes_on(
    tmp_path: Path, undisturbed: Callable[..., Path], trial: int
) -> None:
    launcher, ranks = ("launch", "torchrun")[trial % 2], 2 + trial // 2 % 2
    words = faulty_words(*PACE)
    dice = random.Random(f"agent {trial}")
    job = Job(words, tmp_path, ranks, restarts=3, launcher=launcher)
    assert job.wait_for_step(dice.choice(STEPS))
    time.sleep(dice.uniform(0, LAG))
    assert job.kill(job.process.pid)
    assert job.process.wait() == -signal.SIGKILL
    assert job.left_after(10.0) == {}, "an orphan stays for ever: how soon it ends is the machine's affair"
    again = Job(words, tmp_path, ranks, launcher=launcher)
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
        "recipe=yolo_shapes data.source.train=32 data.source.valid=8 data.source.size=64 train.batch_size=9"
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
    job = Job(words, tmp_path, 3, restarts=10)
    assert kill_at_random(job, dice, range(0, 19, 3), kills=1) == 1
    assert job.wait(400) == 0, job.text[-3000:]
    assert "restart 1 of" in job.text
    assert_same_outcome(tmp_path / "run", undisturbed(3, *words))


WORLDS = [3, 4, 1, 2]


@pytest.mark.faults
@pytest.mark.parametrize("trial", range(7))
def test_a_strict_run_keeps_its_bits_while_the_world_changes(
    tmp_path: Path, undisturbed: Callable[..., Path], trial: int
) -> None:
    """Of one rank or of the agent, in each third of the run: 21 kills."""
    words = faulty_words(*PACE, "strategy=strict", "strategy.shards=4", "checkpoint.every=3")
    dice = random.Random(f"strict {trial}")
    for ranks, steps in zip(WORLDS[:-1], (STEPS[:3], STEPS[3:6], STEPS[6:]), strict=True):
        job = Job(words, tmp_path, ranks)
        assert job.wait_for_step(dice.choice(steps))
        time.sleep(dice.uniform(0, LAG))
        assert job.kill(dice.choice([job.process.pid, *job.rank_pids().values()]))
        assert job.wait() != 0
        assert job.left_after(10.0) == {}
    job = Job(words, tmp_path, WORLDS[-1])
    assert job.wait() == 0, job.text[-3000:]
    assert_same_outcome(tmp_path / "run", undisturbed(2, *words))
