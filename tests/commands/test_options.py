"""Runs with options that change how the model computes."""

from pathlib import Path

import pytest
import torch
from shell import ddptrain

from ddptrain.engine.saved_checkpoint import read, unpack

SHAPES = (
    "recipe=cnn_cifar10 data=shapes data.source.train=300 data.source.valid=90 device=cpu "
    "train.batch_size=64 train.steps=3"
)


@pytest.mark.parametrize(
    "words",
    [
        "precision=bf16 ema.decay=0.9 train.clip_norm=1 sched=onecycle",
        pytest.param("strategy=dp data.resident=false data.workers=2", marks=pytest.mark.long),
        pytest.param(
            "recipe=resnet18_cifar10 data=shapes train.steps=2 train.micro_batch=16", marks=pytest.mark.long
        ),
        pytest.param(
            "recipe=mobilenet_v3 data=shapes train.steps=2 optim=rmsprop sched=step", marks=pytest.mark.long
        ),
    ],
)
def test_options_train(tmp_path: Path, words: str) -> None:
    ended = ddptrain(tmp_path, f"{SHAPES} {words} run.dir=run", OMP_NUM_THREADS="1")
    assert ended.code == 0, ended.err
    assert "loss" in (tmp_path / "run/metrics.jsonl").read_text()


@pytest.mark.long
def test_a_compiled_model_trains_alike_and_saves_clean_names(tmp_path: Path) -> None:
    for mode in ("off", "default"):
        ended = ddptrain(
            tmp_path, f"{SHAPES} compile={mode} ema.decay=0.5 run.dir={mode}", OMP_NUM_THREADS="1"
        )
        assert ended.code == 0, ended.err
    eager, compiled = (unpack(read(tmp_path / mode / "checkpoints/step-3")) for mode in ("off", "default"))
    for one, other in (
        (eager["model"], compiled["model"]),
        (eager["average"]["weights"], compiled["average"]["weights"]),
    ):
        assert one.keys() == other.keys()
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-4)
