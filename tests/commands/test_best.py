"""Which checkpoint a verb takes that is not told: the best of the run, and it says so."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from shell import Ended, ddptrain
from toy import auto, lr_schedule
from verbs import train_on

from ddptrain.config.check import checked
from ddptrain.config.schema import Config
from ddptrain.config.targets import open_package
from ddptrain.engine.saved_checkpoint import read, unpack

open_package("stateful")  # configs may name what is there

SMALL = "recipe=cnn_digits device=cpu model.width=8 run.dir=run observers=[jsonl]"


def asked(folder: Path, words: str) -> Ended:
    done = ddptrain(folder, words, OMP_NUM_THREADS="1")
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 22 steps, whose last two ruined what 20 had learnt."""
    folder = tmp_path_factory.mktemp("best")
    asked(folder, f"{SMALL} train.steps=20")
    asked(folder, f"{SMALL} train.steps=22 optim.lr=100")
    return folder


def test_it_is_the_best_and_the_log_names_its_step_and_value(folder: Path) -> None:
    judged = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    by_step = {line["step"]: line["accuracy"] for line in judged if line["split"] == "valid"}
    assert by_step[22] < by_step[20]
    done = asked(folder, "evaluate run=run")
    found = json.loads(done.out)
    assert (found["step"], found["accuracy"]) == (20, by_step[20])
    line = f"checkpoint run/checkpoints/best: step 20, accuracy {by_step[20]:.4f} (the best; checkpoint=last"
    assert done.err.count(line) == 1
    last = asked(folder, "evaluate run=run checkpoint=last")
    assert json.loads(last.out)["step"] == 22
    assert "the best" not in last.err


@pytest.mark.parametrize("words", ["export run=run format=pt2 out={}", "checkpoint convert run=run out={}"])
def test_so_do_export_and_convert(words: str, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / ("weights.pt" if "convert" in words else "model.pt2")
    done = asked(folder, words.format(target))
    assert "checkpoint run/checkpoints/best: step 20, accuracy " in done.err
    found = torch.load(target) if "convert" in words else torch.export.load(target).state_dict
    saved = unpack(read(folder / "run/checkpoints/best"))["model"]
    assert torch.equal(found["conv1.weight"], saved["conv1.weight"])


@pytest.mark.parametrize("mine", ["mine.pt2", "mine.pt2.json"])
def test_an_export_replaces_nothing_but_an_earlier_one_in_the_run_folder(
    mine: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / mine).write_text("keep")
    words = f"export run=run format=pt2 out={tmp_path}/mine.pt2"
    refused = ddptrain(folder, words, OMP_NUM_THREADS="1")
    assert refused.code == 2
    assert f"{tmp_path / mine}" in refused.err
    assert "exists already, and nothing is overwritten" in refused.err
    assert (tmp_path / mine).read_text() == "keep"
    for name in ("model.pt2", "model.pt2.png"):
        (folder / "run" / name).write_text("of an earlier one")
    asked(folder, "export run=run format=pt2")
    assert torch.export.load(folder / "run/model.pt2").state_dict
    assert not (folder / "run/model.pt2.png").exists(), "this one shows another file"


def test_before_there_is_a_best_it_is_the_last(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/best")
    done = asked(tmp_path, "evaluate run=run")
    assert json.loads(done.out)["step"] == 22
    assert "evaluating run/checkpoints/step-22 " in done.err


@pytest.mark.long
def test_a_branch_has_a_best_of_its_own(folder: Path, tmp_path: Path) -> None:
    """That of the run it starts from is better, and not in its folder."""
    words = SMALL.replace("run.dir=run", "run.dir=branch")
    start = f"{words} run.resume={folder}/run/checkpoints/step-22 train.steps=24 optim.lr=1e-6"
    asked(tmp_path, start)
    summary = json.loads((tmp_path / "branch/summary.json").read_text())
    assert summary["best"]["step"] == 24
    assert (
        "checkpoint branch/checkpoints/best: step 24, accuracy" in asked(tmp_path, "evaluate run=branch").err
    )


@pytest.mark.long
def test_the_best_in_another_metric_is_another_one(folder: Path, tmp_path: Path) -> None:
    """It was changed between two processes of a run: an accuracy is no loss."""
    shutil.copytree(folder / "run", tmp_path / "run")
    asked(tmp_path, f"{SMALL} train.steps=24 optim.lr=1e-6 +task.best_metric=loss")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["split"] == "valid"][-1]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["best"] == {"loss": last["loss"], "step": 24}
    assert json.loads(asked(tmp_path, "evaluate run=run").out)["step"] == 24


def stateful_run(folder: Path, steps: int, dies_at: int | None = None) -> Config:
    """Evaluated in each step and saved in each fifth, at a rate that makes it worse now and then."""
    observers: dict[str, Any] = {"jsonl": {"_target_": "ddptrain.observe.jsonl.Jsonl"}}
    if dies_at is not None:
        observers["dying"] = {"_target_": "stateful.Dying", "step": dies_at}
    return checked(
        {
            "recipe": "stateful", "run": {"dir": str(folder)}, "device": "cpu", "strategy": auto(),
            "task": {"_target_": "stateful.Guess"}, "data": {"_target_": "stateful.Points"},
            "optim": {"_target_": "torch.optim.SGD", "lr": 0.4}, "sched": lr_schedule("constant"),
            "observers": observers,
            "train": {"steps": steps, "batch_size": 6, "eval_every": 1}, "checkpoint": {"every": 5},
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The accuracy after each step of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train_on(1, stateful_run(folder, 24))
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["accuracy"] for line in lines if line["split"] == "valid"]


def test_a_killed_run_goes_on_with_the_best_of_its_own_evaluations(
    values: list[float], tmp_path: Path
) -> None:
    """Killed after every evaluation, resumed from the save before, and ended where the one that was better
    since has not come again."""
    saves = {dies_at: dies_at // 5 * 5 for dies_at in range(6, 24) if dies_at % 5}
    better = [at for at, saved in saves.items() if max(values[saved:at]) >= max(values[:saved])]
    assert len(better) > 2
    for dies_at in better[:4]:
        saved = saves[dies_at]
        alone, killed = tmp_path / f"alone-{dies_at}", tmp_path / f"killed-{dies_at}"
        train_on(1, stateful_run(alone, saved + 1))
        with pytest.raises(AssertionError, match=r"exit codes \[137\]"):
            train_on(1, stateful_run(killed, 24, dies_at))
        train_on(1, stateful_run(killed, saved + 1))
        for path in ("summary.json", "checkpoints/best/manifest.json"):
            ours, theirs = (json.loads((of / path).read_text())["best"] for of in (killed, alone))
            assert ours == theirs
        bests = [unpack(read(of / "checkpoints/best")) for of in (killed, alone)]
        assert_same(bests[0]["model"], bests[1]["model"])
        assert not (killed / "checkpoints/best-before").exists()
