"""Searches: what they draw, that a rebuilt one draws the same, and real sweeps that search."""

import math
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shell import ddptrain, early_refusal, refusal, with_imports
from sweeps import SWEPT, events, start, statuses, swept_words

from ddptrain.cli.compose import parsed
from ddptrain.config.schema import Sweep
from ddptrain.errors import UserError
from ddptrain.sweep.ledger import Job, Ledger, read_ledger
from ddptrain.sweep.ranges import Choice, Numbers, Point, Range
from ddptrain.sweep.search import Search

pytest.importorskip("optuna")
pytest.importorskip("cmaes")

TYPED = f"--multirun --config-dir={SWEPT} recipe=swept device=cpu sweep.dir=sweep"
RATE = Numbers("optim.lr", 1e-4, 1e-1, log=True)
MIX = Numbers("data.mix", 0.0, 1.0)
ACTIVATION = Choice("model.activation", ("relu", "gelu", "tanh"))
WIDTH = Numbers("model.width", 8, 512, log=True, whole=True)
SEARCHES: dict[str, list[Range]] = {
    "tpe": [RATE, MIX, ACTIVATION, WIDTH],
    "random": [RATE, MIX, ACTIVATION],
    "cmaes": [RATE, MIX, WIDTH],
}
FIXED = ("recipe=x", "device=cpu")


def known_surface(point: Point) -> float:
    """At best 0, at a rate of 10^-2.3, a mix of 0.7 and gelu."""
    rate, mix = math.log10(float(point["optim.lr"])), float(point["data.mix"])
    lost = {"gelu": 0.0, "relu": 0.3, "tanh": 0.6}[point.get("model.activation", "gelu")]
    return -((rate + 2.3) ** 2) - (2 * (mix - 0.7)) ** 2 - lost


def searching(search: str, trials: int, seed: int = 0, **asked: object) -> Search:
    settings = Sweep(search=search, trials=trials, seed=seed, **asked)  # type: ignore[arg-type]
    return Search(settings, SEARCHES[search], FIXED)


def words_of(point: Point) -> tuple[str, ...]:
    return (*FIXED, *(f"{name}={text}" for name, text in point.items()))


def tried(search: Search, surface: Callable[[Point], float]) -> list[tuple[Point, float]]:
    """One point after the other, each with its value."""
    jobs: list[Job] = []
    found = []
    while (asked := search.next_point(jobs)) is not None:
        job = Job(len(jobs), str(len(jobs)), words_of(asked.point), generation=asked.generation)
        job.status, job.value = "done", surface(asked.point)
        jobs.append(job)
        found.append((asked.point, job.value))
    return found


def test_tpe_beats_random_on_a_known_surface() -> None:
    """Two continuous ranges and one choice, thirty points; the best that each has found."""
    ranges = [RATE, MIX, ACTIVATION]
    better = 0
    for seed in range(10):
        best = {
            name: max(
                value
                for _, value in tried(
                    Search(Sweep(search=name, trials=30, seed=seed), ranges, FIXED), known_surface
                )
            )
            for name in ("tpe", "random")
        }
        print(f"seed {seed}: tpe {best['tpe']:.4f}, random {best['random']:.4f}")
        better += best["tpe"] > best["random"]
    assert better >= 9


def test_cmaes_converges() -> None:
    """On a surface of numbers: its last ten points are far better than its first ten, the best is near."""
    values = [value for _, value in tried(searching("cmaes", 80), known_surface)]
    assert sum(values[-10:]) > 0.2 * sum(values[:10])
    assert max(values) > -0.02


@pytest.mark.parametrize("search", SEARCHES)
def test_a_search_that_is_made_again_from_the_ledger_asks_for_the_same(tmp_path: Path, search: str) -> None:
    """A life with jobs that run, fail, diverge, are pruned and go on: after each event, the search that lives
    and one that is made of the file, as another process does, agree on the next point."""
    dice = random.Random(7)
    living = searching(search, 60)
    ledger = Ledger(tmp_path)
    running: list[Job] = []
    while True:
        asked = living.next_point(ledger.jobs)
        rebuilt = searching(search, 60).next_point(read_ledger(tmp_path, live=True))
        assert rebuilt == asked
        if asked is None:
            break
        if len(running) < 3 or dice.random() < 0.3:
            job = ledger.job(str(asked.point), words_of(asked.point), asked.generation)
            ledger.write(job, "started", gpus=[], on_cpu=True, on="local")
            running.append(job)
            continue
        job = running.pop(dice.randrange(len(running)))
        value = known_surface(dict(word.partition("=")[::2] for word in job.words))
        seen = {"steps": 9, "metric": "accuracy", "higher_is_better": True}
        ledger.write(job, "evaluated", step=3, value=value - 1, **seen)
        outcome = dice.choice(["done", "done", "pruned", "crash", "diverged", "revived"])
        ended = {"why": "", "seconds": 1.0, "code": 1}
        if outcome == "done":
            ledger.write(job, "ended", **{**ended, "code": 0}, status="done", value=value, **seen)
        elif outcome in ("crash", "diverged"):
            code = 4 if outcome == "diverged" else 1
            ledger.write(job, "ended", **{**ended, "code": code}, status="failed")
        else:
            ledger.write(job, "ended", **{**ended, "code": 75}, status="pruned")
            if outcome == "revived":
                ledger.write(job, "started", gpus=[], on_cpu=True, on="local")
                running.append(job)
    assert len(ledger.jobs) == 60
    assert len({job.words for job in ledger.jobs}) == 60
    assert {job.status for job in ledger.jobs} >= {"done", "pruned", "failed", "running"}


def test_a_point_depends_on_what_is_known_and_on_the_seed() -> None:
    def with_values(values: list[float], seed: int = 0) -> Point:
        jobs: list[Job] = []
        search = searching("tpe", 30, seed)
        for value in values:
            asked = search.next_point(jobs)
            assert asked is not None
            job = Job(len(jobs), str(len(jobs)), words_of(asked.point))
            job.status, job.value = "done", value
            jobs.append(job)
        asked = search.next_point(jobs)
        assert asked is not None
        return asked.point

    rising = [float(value) for value in range(12)]
    assert with_values(rising) == with_values(rising)
    assert with_values(rising) != with_values(rising[::-1])
    assert with_values(rising) != with_values(rising, seed=1)


def test_what_is_pruned_teaches() -> None:
    """Small rates are pruned at a bad value, large ones at a good one: large ones are drawn, though no job is
    done."""
    search = Search(Sweep(search="tpe", trials=60), [RATE], FIXED)
    jobs: list[Job] = []
    rates = []
    while (asked := search.next_point(jobs)) is not None:
        rate = float(asked.point["optim.lr"])
        job = Job(len(jobs), str(len(jobs)), words_of(asked.point))
        job.apply({"event": "evaluated", "step": 1, "steps": 9, "value": math.log10(rate), "metric": "m"})
        job.status = "pruned"
        jobs.append(job)
        rates.append(rate)
    assert sum(rate > 10**-2.5 for rate in rates[-20:]) >= 16


def test_what_diverged_is_avoided_and_other_failures_say_nothing() -> None:
    def drawn(code: int) -> int:
        """How many of the last thirty end so."""
        search = Search(Sweep(search="tpe", trials=50), [RATE], FIXED)
        jobs: list[Job] = []
        while (asked := search.next_point(jobs)) is not None:
            job = Job(len(jobs), str(len(jobs)), words_of(asked.point))
            known = math.log10(float(asked.point["optim.lr"]))  # the best are next to those that fail
            large = known > -2.5
            job.status, job.code, job.value = ("failed", code, None) if large else ("done", 0, known)
            jobs.append(job)
        return sum(job.status == "failed" for job in jobs[-30:])

    assert drawn(4) <= 0.7 * drawn(1)


@pytest.mark.parametrize("search", ["tpe", "random"])
def test_points_that_are_tried_are_not_tried_again(search: str) -> None:
    """A space of twelve, thirty trials: each once, and then it is over."""
    ranges: list[Range] = [
        Choice("a", ("x", "y", "'z, z'")),
        Numbers("b", 0, 3, whole=True, steps=("1", "2", "4", "8")),
    ]
    settings = Sweep(search=search, trials=30)
    found = [tuple(point.values()) for point, _ in tried(Search(settings, ranges, FIXED), lambda _: 0.0)]
    assert len(found) == len(set(found)) == 12


def test_only_points_of_the_ranges_and_of_the_same_line_count() -> None:
    search = searching("tpe", 30)
    inside = {"optim.lr": "1e-3", "data.mix": "0.5", "model.activation": "gelu", "model.width": "64"}
    outside = [
        {**inside, "optim.lr": "1.0"},
        {**inside, "model.width": "wide"},
        {**inside, "data.mix": "nan"},
    ]
    lines = [words_of(inside), words_of(dict(reversed(inside.items()))), *map(words_of, outside)]
    lines += [("recipe=y", *words_of(inside)[1:]), words_of(inside)[1:], (*words_of(inside), "seed=1")]
    jobs = [Job(number, str(number), words) for number, words in enumerate(lines)]
    assert [job.number for job, _ in search.points(jobs)] == [0, 1]
    jobs[4].also.append(words_of({**inside, "data.mix": "0.25"}))
    assert [job.number for job, _ in search.points(jobs)] == [0, 1, 4]


def test_several_objectives_are_sought_together() -> None:
    """Accuracy and seconds both rise with the width; a mix of 0.3 is best for both, at any width."""

    def off(search: str) -> tuple[float, int]:
        """How far from the best mix the last forty points are on average, and how many widths they have."""
        settings = Sweep(search=search, trials=80, objectives={"accuracy": "max", "seconds": "min"})
        found = Search(settings, [WIDTH, MIX], FIXED)
        jobs: list[Job] = []
        while (asked := found.next_point(jobs)) is not None:
            width, lost = int(asked.point["model.width"]), abs(float(asked.point["data.mix"]) - 0.3)
            job = Job(len(jobs), str(len(jobs)), words_of(asked.point), status="done")
            job.results = {"accuracy": math.log(width) - 4 * lost, "seconds": width * math.exp(4 * lost)}
            jobs.append(job)
        last = [point for _, point in found.points(jobs)][-40:]
        mixes = [abs(float(point["data.mix"]) - 0.3) for point in last]
        return sum(mixes) / len(mixes), len({point["model.width"] for point in last})

    (tpe, widths), (uniform, _) = off("tpe"), off("random")
    assert tpe < 0.6 * uniform
    assert widths > 10


def test_an_objective_that_no_job_has_is_named() -> None:
    with pytest.raises(UserError, match=r"job 000 has no accuracy; it has acuracy\."):
        searching("tpe", 50, objectives={"accuracy": "max"}).next_point(
            [Job(0, "0", words_of({"optim.lr": "0.01", "data.mix": "0.5", "model.activation": "gelu",
                                   "model.width": "8"}), status="done", results={"acuracy": 1.0})]
        )  # fmt: skip


@given(st.floats(1e-300, 1e300), st.integers(-(10**9), 10**9))
def test_numbers_come_through_hydra_as_they_were_written(number: float, whole: int) -> None:
    wide = Numbers("x", 1e-300, 1e300)
    text = wide.write(number)
    (override,) = parsed([f"x={text}"])
    assert type(override.value()) is float
    assert override.value() == wide.read(text) == pytest.approx(number, rel=1e-5)
    whole_text = Numbers("x", -(10**9), 10**9, whole=True).write(whole)
    (override,) = parsed([f"x={whole_text}"])
    assert override.value() == whole
    assert type(override.value()) is int


def test_places_in_the_unit_interval_are_even() -> None:
    """What CMA-ES sees of a range; whole numbers share it evenly, ends included."""
    assert [RATE.to_unit(rate) for rate in (1e-4, 1e-1)] == pytest.approx([0, 1])
    assert RATE.from_unit(0.5) == pytest.approx(10**-2.5)
    die = Numbers("x", 1, 6, whole=True)
    drawn = [die.from_unit((place + 0.5) / 600) for place in range(600)]
    assert {side: drawn.count(side) for side in range(1, 7)} == dict.fromkeys(range(1, 7), 100)


@pytest.mark.parametrize(("search", "most"), [("tpe", 1.0), ("random", 1.0), ("cmaes", 1.0)])
def test_a_thousand_points_are_known_at_once(tmp_path: Path, search: str, most: float) -> None:
    """Reading the ledger and asking for the next point."""
    ledger = tmp_path / "ledger.jsonl"
    dice = random.Random(0)
    lines = []
    for number in range(1000):
        point = {"optim.lr": f"{10 ** dice.uniform(-4, -1):.6g}", "data.mix": f"{dice.random():.6g}"}
        point |= {"model.activation": dice.choice(ACTIVATION.texts)} if search != "cmaes" else {}
        point |= {"model.width": str(dice.randint(8, 512))} if search != "random" else {}
        words = '", "'.join(words_of(point))
        drawn = f', "generation": {number // 7}' if search == "cmaes" else ""
        lines.append(f'{{"event": "job", "job": {number}, "key": "{number}", "words": ["{words}"]{drawn}}}')
        lines.append(
            f'{{"event": "ended", "job": {number}, "status": "done", "code": 0, "why": "", "seconds": 1,'
            f' "value": {known_surface(point)}, "metric": "m", "higher_is_better": true}}'
        )
    ledger.write_text("\n".join(lines) + "\n")
    searching(search, 2000).next_point([])  # imports
    began = time.perf_counter()
    jobs = read_ledger(tmp_path, live=False)
    read = time.perf_counter()
    asked = searching(search, 2000).next_point(jobs)
    print(f"{search}: read {read - began:.3f} s, asked {time.perf_counter() - read:.3f} s")
    assert asked is not None
    assert len(searching(search, 2000).points(jobs)) == 1000
    assert time.perf_counter() - read < 5 * most
