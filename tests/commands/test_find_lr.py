"""``find lr``: a rate is suggested at which the recipe trains; by hand-made curves, and by the command."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shell import ddptrain, refusal

from ddptrain.engine.lr_range import range_of, rising_rates, smoothed
from ddptrain.engine.lr_schedules import rising
from ddptrain.engine.schedule import Schedule

DIGITS = "recipe=cnn_digits device=cpu"


@given(st.floats(-3, 0), st.floats(1.0, 2.5), st.floats(0.05, 5.0))
def test_the_range_of_a_curve_that_is_known(lowest: float, width: float, scale: float) -> None:
    """Flat, down as a cosine over ``width`` decades to the lowest loss, and steeply up."""
    rates = rising_rates(1e-6, 10.0, 400)

    def loss(rate: float) -> float:
        decades = math.log10(rate) - (lowest - width)
        if decades < 0:
            return 2.0 * scale
        if decades > width:
            return scale * (1 + 30 * (decades - width))
        return scale * (1.5 + 0.5 * math.cos(math.pi * decades / width))

    found = range_of(rates, [loss(rate) for rate in rates])
    assert found is not None
    # the running mean of some ten points lags by some 0.2 decades
    assert lowest - 0.1 < math.log10(found.lowest_at) < lowest + 0.4
    assert lowest - width - 0.1 < math.log10(found.falls_from) < lowest - width / 4 + 0.4
    assert found.suggestion == pytest.approx(found.lowest_at / 10, rel=0.05)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_rate_rises_on_any_device(on_gpu: bool) -> None:
    """On GPUs a schedule keeps rates of its own, beside the optimizer's."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.02, "lr_scale": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    schedule = Schedule(rising(optimizer, 50, 1e-6, 10.0), 50, on_gpu)
    seen = []
    for step in range(50):
        schedule.at(step)
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
    expected = rising_rates(1e-6, 10.0, 50)
    assert [first for first, _ in seen] == pytest.approx(expected, rel=1e-6)
    assert [second for _, second in seen] == pytest.approx([0.2 * rate for rate in expected], rel=1e-6)


def test_a_loss_that_never_falls_has_no_range() -> None:
    rates = rising_rates(1e-6, 10.0, 100)
    assert range_of(rates, [2.3] * 100) is None
    assert range_of(rates, [2.3 + 0.01 * (i % 3) for i in range(100)]) is None
    assert range_of(rates, [2.3 * 1.1**i for i in range(100)]) is None
    assert range_of(rates[:5], [5.0, 4.0, 3.0, 2.0, 1.0]) is None


def test_the_mean_begins_with_the_first_loss() -> None:
    assert smoothed([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert smoothed([1.0, 0.0]) == pytest.approx([1.0, 0.9 / 1.9])


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_suggestion_trains_better_than_rates_far_from_it(tmp_path: Path, ranks: int) -> None:
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    )
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "ddptrain", "find", "lr", *DIGITS.split(), "out=seen/lr.png"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    override = done.stdout.splitlines()[-1]
    rate = float(override.removeprefix("optim.lr="))
    assert (tmp_path / "seen/lr.png").read_bytes().startswith(b"\x89PNG")
    curve = json.loads((tmp_path / "seen/lr.json").read_text())
    assert len(curve["lr"]) == len(curve["loss"]) > 50
    assert sorted(path.name for path in tmp_path.iterdir()) == ["seen"]  # nothing of a run is left
    losses = {}
    for factor in (1 / 50, 1, 50):
        words = f"{DIGITS} train.steps=60 optim.lr={rate * factor} run.dir=run{factor} observers=[jsonl]"
        ended = ddptrain(tmp_path, words)
        assert ended.code in (0, 4)
        losses[factor] = math.inf
        if ended.code == 0:
            summary = json.loads((tmp_path / f"run{factor}/summary.json").read_text())
            losses[factor] = summary["metrics"]["loss"]
    assert losses[1] < min(losses[1 / 50], losses[50])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("find lr", "say what to train: recipe=<name>"),
        (f"find rate {DIGITS}", "find rate: say what to do: find lr recipe=<name>."),
        (f"find lr {DIGITS} step=3", "step: find lr takes no such word. Did you mean steps?"),
        (f"find lr {DIGITS} steps=x", "steps=x: must be a whole number"),
        (f"find lr {DIGITS} steps=nan", "steps=nan: must be a whole number"),
        (f"find lr {DIGITS} highest=inf", "highest=inf: must be"),
        (f"find lr {DIGITS} out=lr.xyz", "out=lr.xyz: must be a .png in a folder"),
        (f"find lr {DIGITS} steps=5", "steps=5: must be at least 20."),
        (f"find lr {DIGITS} lowest=1 highest=0.1", "lowest=1, highest=0.1: must be above 0"),
        (f"find lr {DIGITS} --multirun", "find: takes one config"),
        (f"find lr {DIGITS} optim.layer_decay=2", "optim.layer_decay=2: must be"),
        pytest.param(
            f"find lr {DIGITS} highest=1e-5",
            "find lr: from 1e-06 to 1e-05 the loss does not fall",
            marks=pytest.mark.long,
        ),
    ],
)
def test_mistakes(tmp_path: Path, words: str, message: str) -> None:
    assert refusal(tmp_path, words).startswith(message)


def test_what_is_thawed_later_is_tested_too(tmp_path: Path) -> None:
    """With a rate of its own, which the frozen part would not take."""
    thaw = ["freeze=[conv1.*]", "thaw=0.5", "optim.groups=[{params: 'conv1.*', lr: 0.1}]"]
    done = ddptrain(tmp_path, ["find", "lr", *DIGITS.split(), *thaw, "steps=30", "highest=1"])
    assert done.code == 0, done.err
    assert "group      conv1.*: lr x 0.1" in done.err
    assert "what thaw= trains later is trained in all steps" in done.err
