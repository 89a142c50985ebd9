"""What a sweep's report says of its settings: which matter, which jobs are the best, and the picture."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from PIL import Image
from shell import ddptrain
from sweeps import hide_optuna

from ddptrain.tools.sweep.ledger import Job, Ledger
from ddptrain.tools.sweep.objectives import pareto_front
from ddptrain.tools.sweep.outcomes import importances, outcomes_of
from ddptrain.tools.sweep.parallel import draw_parallel
from ddptrain.tools.sweep.ranges import Choice, Numbers

SCORES = st.lists(st.tuples(*[st.integers(0, 5).map(float)] * 2), min_size=1, max_size=30)


@given(SCORES)
def test_the_pareto_front_is_what_nothing_beats(scores: list[tuple[float, ...]]) -> None:
    def beaten(mine: tuple[float, ...]) -> bool:
        return any(o != mine and all(a >= b for a, b in zip(o, mine, strict=True)) for o in scores)

    expected = {number for number, mine in enumerate(scores) if not beaten(mine)}
    assert pareto_front(dict(enumerate(scores))) == expected


def grid(folder: Path) -> list[Job]:
    """Rate times seed times name; only the rate matters, 0.01 is the best."""
    ledger = Ledger(folder)
    dice = random.Random(0)
    for rate, seed, name in itertools.product(
        ("0.0001", "0.001", "0.01", "0.1"), "1234567", ("a $x", "b_$y$")
    ):
        job = ledger.job(
            f"{rate} {seed} {name}", (f"optim.lr={rate}", "recipe=x", f"seed={seed}", f"n='{name}'")
        )
        value = {"0.0001": 0.3, "0.001": 0.6, "0.01": 0.9, "0.1": 0.1}[rate] + 0.02 * dice.random()
        facts = {"metric": "accuracy", "higher_is_better": True, "value": value, "step": 9, "steps": 9}
        ledger.write(job, "ended", status="done", code=0, why="", seconds=1.0, **facts)
    return ledger.jobs


def test_settings_of_a_grid(tmp_path: Path) -> None:
    outcomes = outcomes_of(grid(tmp_path))
    assert outcomes is not None
    assert outcomes.ranges == (
        Numbers("optim.lr", 0.0001, 0.1, log=True),
        Numbers("seed", 1, 7, whole=True),
        Choice("n", ("'a $x'", "'b_$y$'")),
    )
    assert outcomes.objectives == {"accuracy": "max"}
    pytest.importorskip("optuna")
    shares = importances(outcomes)
    assert next(iter(shares)) == "optim.lr"
    assert shares["optim.lr"] > 0.8
    assert sum(shares.values()) == pytest.approx(1)


def test_of_few_jobs_no_importances_are_told(tmp_path: Path) -> None:
    """Six say of a setting that moves the results by a tenth of the other's that it is all that counts."""
    pytest.importorskip("optuna")
    widths = {8: 0.5, 16: 0.52, 32: 0.54}
    jobs = []
    for rate, width in itertools.product((0.1, 0.001), widths):
        value = widths[width] + (0.3 if rate == 0.1 else 0.0)
        jobs.append(Job(len(jobs), str(len(jobs)), (f"optim.lr={rate}", f"task.width={width}"), value=value))
        jobs[-1].status, jobs[-1].metric = "done", "accuracy"
    outcomes = outcomes_of(jobs)
    assert outcomes is not None
    assert importances(outcomes) == {}


def test_numbers_drawn_evenly_are_no_logarithms() -> None:
    """Though the smallest of a hundred is a hundredth of the largest."""
    dice = random.Random(1)
    jobs = [
        Job(n, str(n), (f"mix={dice.random():.6g}", f"rate={10 ** dice.uniform(-4, -1):.6g}"), value=1.0 * n)
        for n in range(100)
    ]
    for job in jobs:
        job.status, job.metric = "done", "m"
    outcomes = outcomes_of(jobs)
    assert outcomes is not None
    assert [(each.name, isinstance(each, Numbers) and each.log) for each in outcomes.ranges] == [
        ("mix", False),
        ("rate", True),
    ]


def test_one_far_result_does_not_hide_the_others(tmp_path: Path) -> None:
    """Signs of formulas, and a loss of 10^9: a picture, with the best in orange."""
    jobs = grid(tmp_path)
    for job in jobs:
        job.metric, job.higher_is_better, job.value = "loss", False, 1 - (job.value or 0)
    jobs[0].value = 1e9
    outcomes = outcomes_of(jobs)
    assert outcomes is not None
    draw_parallel(outcomes, {}, tmp_path / "plots" / "parallel.png")
    with Image.open(tmp_path / "plots" / "parallel.png") as picture:
        raw = picture.convert("RGB").tobytes()
        assert picture.width > 700
    assert (
        sum(
            abs(r - 0xDD) + abs(g - 0x6B) + abs(b - 0x20) < 30
            for r, g, b in zip(*[iter(raw)] * 3, strict=True)
        )
        > 500
    )


def test_a_report_without_optuna_says_so_and_goes_on(tmp_path: Path) -> None:
    grid(tmp_path / "sweep")
    done = ddptrain(tmp_path, "report sweep", **hide_optuna(tmp_path))
    assert done.code == 0, done.err
    assert "importance  needs optuna: pip install 'ddptrain[optuna]'" in done.out.splitlines()
    assert "plot  sweep/plots/parallel.png" in done.out.splitlines()


def test_one_bad_result_among_equal_ones_is_drawn_below_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[Any] = []
    monkeypatch.setattr(Axes, "add_collection", lambda _, drawn: lines.extend(drawn.get_segments()))
    jobs = grid(tmp_path)
    for job in jobs:
        job.metric, job.value = "accuracy", 1.0
    jobs[0].value = 0.1
    outcomes = outcomes_of(jobs)
    assert outcomes is not None
    draw_parallel(outcomes, {}, tmp_path / "plots" / "parallel.png")
    assert sorted(line[-1][1] for line in lines) == [0.0, *[1.0] * (len(jobs) - 1)]
