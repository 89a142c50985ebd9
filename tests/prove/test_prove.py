"""The verb ``prove``: it passes a recipe that keeps its promises, and finds what breaks one."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
from marked import MARK, left_after, living
from shell import RANK_VARIABLES, Ended, refusal

from ddptrain.tools.prove.kill_schedule import Moment, marks, next_kill
from ddptrain.tools.prove.process import short
from ddptrain.tools.prove.state_diff import differences, first_line_apart, gradients_apart

HERE = Path(__file__).parents[1]
WORDS = ["--config-dir=mine", "recipe=my_recipe", "device=cpu"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with a recipe that keeps all promises and some that break one."""
    shutil.copytree(HERE / "packaging/my_recipe", tmp_path / "mine")
    shutil.copy(HERE / "support/unkept/unkept.py", tmp_path / "mine")
    return tmp_path


def prove(folder: Path, *words: str) -> Ended:
    inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    ended = subprocess.run(
        [sys.executable, "-m", "ddptrain", "prove", *words, *WORDS], cwd=folder, capture_output=True,
        text=True, env={**inherited, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}, timeout=280,
    )  # fmt: skip
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def verdict(ended: Ended) -> str:
    assert "Traceback" not in ended.err, ended.err
    return ended.out.splitlines()[-1]


def kept(folder: Path) -> list[Path]:
    return list(folder.glob("ddptrain-prove-*"))


@pytest.mark.long
def test_a_resume_that_is_the_same_run(folder: Path) -> None:
    ended = prove(folder, "resume", "ranks=2", "kills=2", "moments=5")
    assert ended.code == 0, ended.out + ended.err
    assert verdict(ended).startswith("prove resume: HOLDS: killed 2 times, it ends with the same bits")
    assert "moments=5" in ended.out
    assert kept(folder) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("Counting", "two undisturbed runs are equal: something that the training goes on from is in no"),
        pytest.param(
            "Noisy",
            "two undisturbed runs differ too: something is random that does not follow from the seed",
            marks=pytest.mark.faults,
        ),
    ],
)
def test_a_resume_that_is_another_run(folder: Path, task: str, reason: str) -> None:
    ended = prove(folder, "resume", "ranks=1", "kills=3", "moments=3", f"task._target_=unkept.{task}")
    assert ended.code == 1, ended.out + ended.err
    said = verdict(ended)
    assert said.startswith("prove resume: BROKEN: ")
    assert "first model.weight (by " in said
    assert "metrics.jsonl differs first at step " in said
    assert reason in said
    [trials] = kept(folder)  # to look into
    assert str(trials) in ended.err
    assert (trials / "killed-1/checkpoints/step-40").is_dir()


@pytest.mark.long
def test_ranks_that_train_the_same(folder: Path) -> None:
    ended = prove(folder, "world", "ranks=2")
    assert ended.code == 0, ended.out + ended.err
    assert verdict(ended).startswith("prove world: HOLDS: 1 to 2 ranks train the same, to rounding")


@pytest.mark.faults
def test_ranks_that_train_the_same_bits(folder: Path) -> None:
    ended = prove(folder, "world", "ranks=2", "strategy=strict", "train.steps=9", "out=here")
    assert ended.code == 0, ended.out + ended.err
    assert verdict(ended) == "prove world: HOLDS: on 1 to 2 ranks all bits are equal."
    assert (folder / "here/strict-2/checkpoints/step-9").is_dir()


@pytest.mark.faults
def test_layers_that_see_one_ranks_part_are_named(folder: Path) -> None:
    ended = prove(folder, "world", "ranks=2", "train.steps=9", "task._target_=unkept.Normed")
    assert ended.code == 0, ended.out + ended.err
    said = verdict(ended)
    assert said.startswith("prove world: EXPECTED: ")
    assert "BatchNorm in 0 and dropout in 1" in said
    assert said.endswith("with strategy=strict all bits are equal.")


@pytest.mark.long
@pytest.mark.parametrize(
    "broken",
    [pytest.param("data._target_=unkept.Shifted", marks=pytest.mark.faults), "task._target_=unkept.Mean"],
)
def test_ranks_that_train_something_else(folder: Path, broken: str) -> None:
    ended = prove(folder, "world", "ranks=2", broken)
    assert ended.code == 1, ended.out + ended.err
    found = "on 2 ranks the first step has other gradients, from weight on (2 of 2 parameters)."
    assert verdict(ended) == f"prove world: BROKEN: {found}"


@pytest.mark.faults
def test_metrics_that_do_not_depend_on_the_ranks(folder: Path) -> None:
    ended = prove(folder, "eval", "ranks=2")
    assert ended.code == 0, ended.out + ended.err
    assert verdict(ended).startswith(
        "prove eval: HOLDS: evaluate prints the same bytes on 1 to 2 ranks: error 0.0"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("Averages", "in batches of 99 error is "),
        pytest.param("OwnShare", "on 2 ranks error is ", marks=pytest.mark.faults),
    ],
)
def test_metrics_that_depend_on_how_they_are_computed(folder: Path, task: str, reason: str) -> None:
    ended = prove(folder, "eval", "ranks=2", f"task._target_=unkept.{task}", "train.eval_batch_size=100")
    assert ended.code == 1, ended.out + ended.err
    assert verdict(ended).startswith(f"prove eval: BROKEN: {reason}")


@pytest.mark.long
def test_a_training_that_fails_is_shown(folder: Path) -> None:
    ended = prove(folder, "world", "ranks=2", "optim.lr=1e30", "optim=sgd")
    assert ended.code == 1, ended.out + ended.err
    assert "prove world: FAILED: exit code 4. The end of " in ended.out
    assert "the training has diverged" in ended.out


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "say what to do: prove resume|world|eval"),
        ("resum", "Did you mean resume?"),
        ("resume", "say what to train"),
        ("eval recipe=my_recipe --multirun", "without --multirun"),
        ("world recipe=my_recipe ranks=1", "ranks=1: must be 2 or more"),
        ("eval recipe=my_recipe ranks=1", "ranks=1: must be 2 or more"),
        ("resume recipe=my_recipe ranks=0", "both must be 1 or more"),
        ("resume recipe=my_recipe kills=many", "kills=many: must be"),
        ("resume recipe=my_recipe rank=2", "Did you mean ranks?"),
        ("eval recipe=my_recipe kills=2", "kills: prove eval takes no such word"),
        ("world recipe=my_recipe ranks=60", "train.batch_size=50, has to give each rank a sample"),
        ("world recipe=my_recipe run.dir=x", "leave it out"),
        ("resume recipe=my_recipe observers=[console]", "add jsonl: observers=[console,jsonl]"),
        ("world recipe=my_recipe out=mine", "is not empty"),
        ("world recipe=my_recipe train.step=3", "Did you mean train.steps?"),
    ],
)
def test_refusals(folder: Path, words: str, said: str) -> None:
    assert said in refusal(folder, ["prove", *words.split(), "--config-dir=mine"])
    assert kept(folder) == []


def test_it_does_not_run_inside_torchrun(folder: Path) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert "torchrun" in refusal(folder, ["prove", "eval", *WORDS], **ranks)


def test_a_proof_is_short_unless_told_otherwise() -> None:
    own = [
        "observers=[console,jsonl]",
        "train.steps=40",
        "checkpoint.every=7",
        "log.every=5",
        "train.eval_every=13",
    ]
    assert short(["recipe=x"]) == own
    assert short(["train.steps=600", "log.every=9", "~observers.plots"]) == [
        "checkpoint.every=101", "train.eval_every=200",
    ]  # fmt: skip
    assert short(["train.epochs=2"]) == own[:1]


def test_differences_are_of_bits_and_in_order() -> None:
    ours = {"model.b": torch.zeros(2), "model.a": torch.tensor([float("nan"), 1.0]), "step": 3, "best": None}
    assert differences(ours, {**ours, "model.a": ours["model.a"].clone()}) == []
    theirs = {**ours, "model.b": -ours["model.b"], "step": 5, "more": 1}
    assert [(one.name, one.largest) for one in differences(ours, theirs)] == [
        ("model.b", 0.0), ("step", 2.0), ("more", float("inf")),
    ]  # fmt: skip


def test_a_gradient_that_is_nothing_but_rounding_is_no_difference() -> None:
    """A key's bias in attention: its gradient is zero, and Adam makes steps of full length of it."""
    ours = {
        "model.w": torch.ones(4), "model.k": torch.ones(4),
        "optimizer.state.0.exp_avg": torch.ones(4), "optimizer.state.1.exp_avg": torch.full((4,), 1e-8),
    }  # fmt: skip
    theirs = {**ours, "model.k": -torch.ones(4), "optimizer.state.1.exp_avg": torch.full((4,), -1e-8)}
    assert max(gradients_apart(ours, theirs).values()) < 1e-5
    theirs["optimizer.state.0.exp_avg"] = torch.full((4,), 1.5)
    assert gradients_apart(ours, theirs)["optimizer.state.0.exp_avg"] == pytest.approx(1 / 3)
    plain = [{name: value for name, value in state.items() if "model" in name} for state in (ours, theirs)]
    assert gradients_apart(*plain) == {"model.w": 0.0, "model.k": 2.0}


def test_the_first_line_that_differs(tmp_path: Path) -> None:
    lines = [{"step": step, "split": "train", "loss": 1.0} for step in (5, 10)]
    for name, last in (("a", 1.0), ("b", 1.00001), ("c", None)):
        (tmp_path / name).mkdir()
        written = [*lines, {"step": 15, "split": "valid", "error": last}] if last else lines
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    a, b, c = (tmp_path / name for name in "abc")
    assert first_line_apart(a, a) == ""
    assert first_line_apart(a, b) == "step 15, valid: error 1.0 and 1.00001"
    assert first_line_apart(a, b, tolerance=1e-3) == ""
    assert first_line_apart(a, c) == "step 15, valid: a line that only one of them has"


def test_kills_fall_into_what_is_left_of_a_run(tmp_path: Path) -> None:
    for name in ("step-7", "step-14", ".step-21.123", "best", ".best.123"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text("{}\n{}\n{")
    assert marks(tmp_path) == {"line 1", "line 2", "step-7", "step-14", ".step-21"}
    timeline = [Moment(f"step-{step}", step, 1.0, "") for step in (7, 14, 21, 28, 35, 40)]
    draw = random.Random(1)
    drawn = [next_kill(draw, timeline, tmp_path, ranks=2, still=1) for _ in range(200)]
    assert {kill.moment.step for kill in drawn if kill} == {
        21,
        28,
        35,
    }  # nothing is left to kill after the last
    assert {tuple(kill.victims) for kill in drawn if kill} == {(0,), (1,), (0, 1)}
    first = [next_kill(draw, timeline, tmp_path, ranks=2, still=3) for _ in range(50)]
    assert {kill.moment.step for kill in first if kill} == {21}
    (tmp_path / "checkpoints/step-40").mkdir()
    assert next_kill(draw, timeline, tmp_path, ranks=2, still=1) is None


@pytest.mark.long
def test_the_test_that_the_page_shows_passes(tmp_path: Path) -> None:
    """On the recipe that docs/recipes.md shows."""
    page = (HERE.parent / "docs/prove.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "test_mine.py").write_text(code)
    shutil.copy(HERE / "packaging/my_recipe/my_recipe.py", tmp_path)
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.long
def test_its_trainings_end_with_it(folder: Path) -> None:
    """At the signal of a scheduler or of CI, and at a kill."""
    for number, kept_folders in ((signal.SIGTERM, 0), (signal.SIGKILL, 1)):
        mark = uuid.uuid4().hex
        inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        words = ["resume", "ranks=1", *WORDS, "train.steps=1000000"]
        process = subprocess.Popen(
            [sys.executable, "-m", "ddptrain", "prove", *words], cwd=folder, stderr=subprocess.DEVNULL,
            env={**inherited, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", MARK: mark},
        )  # fmt: skip
        until = time.monotonic() + 120
        while not any("step" in file.read_text() for file in folder.glob("ddptrain-prove-*/*.txt")):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        assert len(living(mark)) > 1
        process.send_signal(number)
        process.wait(60)
        assert left_after(mark, 20) == {}
        assert len(kept(folder)) == kept_folders
