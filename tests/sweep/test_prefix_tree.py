"""Which job trains for which: the tree by itself, over beginnings that are known."""

import time
from itertools import combinations
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from ddptrain.commands.beginnings import common_steps
from ddptrain.config.schema import Config, Sched, Train
from ddptrain.sweep.beginnings import Beginnings, may_share
from ddptrain.sweep.ledger import key_of
from ddptrain.sweep.sharing import Branch, Saved, branches


class Known(Beginnings):
    """Of runs that are given as what is done in each step."""

    def __init__(self, runs: list[str]) -> None:
        super().__init__({})
        lengths = [len(run) for run in runs]
        self.steps = dict(enumerate(lengths))
        for i, j, steps in common_steps([iter(run) for run in runs], lengths):
            self._common[i, j] = self._common[j, i] = steps

    def relatives(self, number: int) -> list[int]:
        return list(self.steps)


RUNS = st.lists(st.text("ab", min_size=1, max_size=12), min_size=1, max_size=8)


@settings(max_examples=300, deadline=None)
@given(runs=RUNS)
def test_every_step_that_can_be_shared_is_trained_once(runs: list[str]) -> None:
    """As many steps as there are different beginnings; a job's last step is its own."""
    known = Known(runs)
    for (i, one), (j, other) in combinations(enumerate(runs), 2):
        most = min(len(one), len(other)) - 1
        same = next((n for n in range(most) if one[n] != other[n]), most)
        assert known.common(i, j) == known.common(j, i) == same
    numbers = range(len(runs))
    found = branches(known, numbers, {}, dict.fromkeys(numbers, Saved()))
    trained = sum(map(len, runs)) - sum(branch.step for branch in found.values())
    beginnings = {run[:step] for run in runs for step in range(1, len(run))}
    assert trained == len(beginnings) + len(runs)
    for number in numbers:  # no circle, and no trunk that would begin behind the branch
        way = [number]
        while (last := found.get(way[-1])) is not None:
            assert last.trunk not in way
            assert last.trunk not in found or found[last.trunk].step <= last.step
            assert last.step <= known.common(way[-1], last.trunk)
            way.append(last.trunk)


@settings(max_examples=300, deadline=None)
@given(runs=RUNS, data=st.data())
def test_a_branch_is_where_its_trunk_has_been_saved_or_still_gets(
    runs: list[str], data: st.DataObject
) -> None:
    known = Known(runs)
    numbers = list(range(len(runs)))
    kinds = {n: data.draw(st.sampled_from(["idle", "busy", "over"])) for n in numbers}
    idle = [n for n in numbers if kinds[n] == "idle"]
    busy = {n: data.draw(st.integers(1, 12)) for n in numbers if kinds[n] == "busy"}
    steps = st.lists(st.integers(1, 12), max_size=2, unique=True).map(sorted)
    saved = {}
    for number in set(numbers) - busy.keys():
        own = data.draw(steps)
        saved[number] = Saved(max(own, default=0), tuple(own[data.draw(st.integers(0, 2)) :]))
    found = branches(known, idle, busy, saved)
    for number, (trunk, step) in found.items():
        assert kinds[number] == "idle"
        assert not saved[number].newest
        assert 0 < step <= known.common(number, trunk)
        if kinds[trunk] == "busy":
            assert busy[trunk] <= step
        elif kinds[trunk] == "over" or step <= saved[trunk].newest:
            assert step in saved[trunk].points


def test_the_longest_common_beginning_is_chosen() -> None:
    known = Known(["aaaaaaaa", "aaaabbbb", "aaaabbcc"])
    new = Saved()
    assert branches(known, [0, 1, 2], {}, {0: new, 1: new, 2: new}) == {1: Branch(0, 4), 2: Branch(1, 6)}
    assert branches(known, [1, 2], {0: 5}, {1: new, 2: new}) == {2: Branch(1, 6)}
    assert branches(known, [1, 2], {0: 3}, {1: new, 2: new}) == {1: Branch(0, 4), 2: Branch(1, 6)}
    over = Saved(6, (3, 6))
    assert branches(known, [1, 2], {}, {0: over, 1: new, 2: new}) == {1: Branch(0, 3), 2: Branch(1, 6)}
    after_best = Saved(4, ())  # its best one came after its last save
    assert branches(known, [0, 1, 2], {}, {0: after_best, 1: new, 2: new}) == {2: Branch(1, 6)}


def config(**changes: object) -> Config:
    optim = {"_target_": "torch.optim.SGD", "lr": 0.1}
    data = {"_target_": "ddptrain.data.dates.DatePairs"}
    given = {"recipe": "r", "task": {}, "data": data, "optim": optim, "strategy": {}, **changes}
    return Config(**given)  # type: ignore[arg-type]


def test_in_doubt_nothing_is_shared() -> None:
    assert may_share(config())
    for optim in (
        {"_target_": "torch.optim.SGD", "lr": 0.1, "layer_decay": 0.5},
        {"_target_": "mine.SGD", "lr": 0.1},
        {"_target_": "torch.optim.SGD", "lr": None},
    ):
        assert not may_share(config(optim=optim))
    for train in (Train(micro_batch="auto"), Train(eval_batch_size="auto")):
        assert not may_share(config(train=train))


def test_where_a_start_stops_is_no_part_of_a_job() -> None:
    assert key_of(config(train=Train(step_limit=3))) == key_of(config())
    assert key_of(config(train=Train(steps=3))) != key_of(config())


def test_compiled_jobs_of_other_lengths_share_nothing() -> None:
    def shared(mode: str, *runs: tuple[int, float]) -> int:
        jobs = [
            config(compile=mode, train=Train(steps=steps), sched=Sched("wsd", cooldown=cooldown))
            for steps, cooldown in runs
        ]
        return Beginnings(dict(enumerate(jobs))).common(0, 1)

    assert shared("off", (40, 0.2), (50, 0.2)) == 33
    assert shared("default", (40, 0.2), (50, 0.2)) == 0
    assert shared("default", (40, 0.2), (40, 0.5)) == 21


def test_a_thousand_jobs_are_planned_in_seconds(tmp_path: Path) -> None:
    """A hundred points of ten cooldowns each; and a thousand that have nothing in common, at once."""
    jobs = {
        n: config(seed=n // 10, sched=Sched("wsd", cooldown=0.05 + 0.05 * (n % 10)), train=Train(steps=100))
        for n in range(1000)
    }
    began = time.monotonic()
    found = Beginnings(jobs)
    saved = dict.fromkeys(jobs, Saved())
    assert len(branches(found, jobs, {}, saved)) == 900
    print(f"{time.monotonic() - began:.1f} s")
    began = time.monotonic()
    assert not Beginnings({n: config(seed=n) for n in jobs}).steps
    assert time.monotonic() - began < 5
