"""stop.patience, stop.target, freeze and thaw by the command line."""

import json
from pathlib import Path

import pytest
from shell import ddptrain, refusal

DIGITS = "recipe=cnn_digits device=cpu train.eval_every=4 observers=[console,jsonl]"
MINE = """
from ddptrain.api import Controller

class Never(Controller):
    def goes_on(self, event):
        return True
"""


@pytest.mark.long
def test_a_run_ends_early(tmp_path: Path) -> None:
    words = f"{DIGITS} optim.lr=1e-30 train.steps=40 stop.patience=3 run.dir=run"
    for _ in range(2):  # the second time it finds out again, without a further step
        ended = ddptrain(tmp_path, f"launch --nproc-per-node=2 {words}")
        assert ended.code == 0, ended.err
        said = "accuracy has not improved for 3 evaluations (stop.patience), at step 16"
        assert (ended.out + ended.err).count(said) == 1
        assert json.loads((tmp_path / "run/summary.json").read_text())["outcome"] == "stopped early"
    ended = ddptrain(tmp_path, words.replace("patience=3", "patience=5"))
    assert "has not improved for 5 evaluations (stop.patience), at step 24" in ended.out + ended.err
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["split"] == "valid"] == [4, 8, 12, 16, 20, 24]
    message = refusal(tmp_path, f"{DIGITS} train.steps=8 stop.patience=3 stop.metric=acc")
    assert message.startswith("stop.metric=acc: the evaluation has accuracy, ")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/my_stop.py").write_text(MINE)
    theirs = "--config-dir=mine +controllers.stop._target_=my_stop.Never"
    message = refusal(tmp_path, f"{DIGITS} {theirs} stop.patience=3")
    assert message.startswith("controllers.stop: this name is that of stop.patience and stop.target")
    message = refusal(tmp_path, f"{DIGITS} stop.metric=loss")
    assert message.startswith("stop.metric=loss: needs stop.patience or stop.target")


@pytest.mark.long
def test_a_run_that_starts_from_another_ones_checkpoint_has_a_patience_of_its_own(tmp_path: Path) -> None:
    words = f"{DIGITS} model.width=4 optim.lr=1e-30 stop.patience=2"
    for run, last in (("theirs", 12), ("ours run.resume=theirs/checkpoints/step-12", 20)):
        ended = ddptrain(tmp_path, f"{words} train.steps=40 run.dir={run}")
        assert ended.code == 0, ended.err
        assert f"has not improved for 2 evaluations (stop.patience), at step {last}" in ended.out + ended.err


@pytest.mark.long
def test_a_sweep_counts_it_done(tmp_path: Path) -> None:
    words = f"--multirun {DIGITS} optim.lr=1e-30,0.003 train.steps=40 stop.target=0.4 sweep.dir=swept"
    ended = ddptrain(tmp_path, words)
    assert ended.code == 0, ended.err
    outcomes = sorted(
        json.loads(path.read_text())["outcome"] for path in (tmp_path / "swept").rglob("summary.json")
    )
    assert outcomes == ["done", "stopped early"]


@pytest.mark.long
def test_frozen_parts_are_trained_from_a_step_on(tmp_path: Path) -> None:
    words = (
        "recipe=mobilenet_cifar10 data=shapes data.source.train=80 data.source.valid=20 device=cpu"
        " train.batch_size=20 train.steps=5 observers=[]"
    )
    ended = ddptrain(tmp_path, f"launch --nproc-per-node=2 {words} run.dir=run freeze=[features.*] thaw=0.5")
    assert ended.code == 0, ended.err
    said = ended.out + ended.err
    assert ", until step 3: features.0.0.weight, " in said
    assert "thawed     at step 3: " in said
    longer = f"launch --nproc-per-node=2 {words} train.steps=12 run.dir=run freeze=[features.*] thaw=0.5"
    ended = ddptrain(tmp_path, longer)  # half of twelve is six, and it has been thawed at three
    assert ended.code == 0, ended.err
    assert "frozen " not in ended.out + ended.err
    message = refusal(tmp_path, f"{words} run.dir=run freeze=[features.*]")
    assert message.startswith("freeze, thaw, optim.groups")
    message = refusal(tmp_path, f"{words} run.dir=other thaw=0.5")
    assert message.startswith("thaw: nothing is frozen")
    message = refusal(tmp_path, f"{words} run.dir=other freeze=[features.*] thaw=0.99")
    assert message.startswith("thaw=0.99: comes after the last of 5 steps")
    assert ddptrain(tmp_path, f"{words} run.dir=free train.steps=2").code == 0
    ended = ddptrain(tmp_path, f"{words} run.dir=free train.steps=10 freeze=[features.*] thaw=0.55")
    assert ended.code == 0, ended.err
    said = ended.out + ended.err
    assert ", until step 6: features.0.0.weight, " in said, "frozen from where it goes on"
    assert "thawed     at step 6: " in said
