"""What a task keeps from step to step, changed in place or made anew: the same training."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import Classify, Fit, run_killed_at, weights

from ddptrain.api.recipe import Loss, Progress
from ddptrain.api.world import World
from ddptrain.engine.plan import Plan
from ddptrain.errors import UserError

PLAN = Plan(
    steps=9, train_size=60, batch_size=20, eval_every=3, save_every=2, seed=5, skips_nonfinite=True,
    nonfinite_limit=3,
)  # fmt: skip


class Carrying(Classify):
    """A mean of each row's features weighs its loss. in_place: it is one tensor for ever."""

    in_place = False
    bad_steps: tuple[int, ...] = ()
    rows: int | None = None
    """So many of them are told; None: all."""

    def __init__(self, make_model: Any) -> None:
        super().__init__(make_model)
        self._seen: Tensor | None = None
        self.at_steps: dict[int, Tensor | None] = {}

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], progress: Progress) -> Loss:
        features, labels = batch
        self.at_steps[progress.step] = None if self._seen is None else self._seen.clone()
        mean = features.mean(dim=1)
        if self._seen is None:
            self._seen = mean.clone()
        elif self.in_place:
            self._seen.mul_(0.9).add_(mean)
        else:
            self._seen = 0.9 * self._seen + mean
        each = nn.functional.cross_entropy(model(features), labels, reduction="none")
        total = (each * self._seen.tanh().square()).sum()
        return Loss(total * float("nan") if progress.step in self.bad_steps else total, len(labels))

    def rank_state(self) -> Mapping[str, Tensor]:
        return {} if self._seen is None else {"seen": self._seen[: self.rows]}

    def load_rank_state(self, rows: Mapping[str, Tensor]) -> None:
        self._seen = rows.get("seen")


class InPlace(Carrying):
    in_place = True


@pytest.mark.parametrize("bad_steps", [(), (0,), (2, 5), (0, 1, 4)])
@pytest.mark.parametrize("killed_at", [None, 4])
@pytest.mark.parametrize("thaw_at", [None, 3])
def test_a_state_that_is_changed_in_place(
    bad_steps: tuple[int, ...], killed_at: int | None, thaw_at: int | None, tmp_path: Path
) -> None:
    """Steps left out, kills and a thaw leave it as one that is made anew in each step."""
    found = {}
    for kind in (Carrying, InPlace):
        task = type(kind.__name__, (kind,), {"bad_steps": bad_steps})
        fit = Fit(PLAN, task=task, freeze=("0.*",) if thaw_at else (), thaw_at=thaw_at)
        folder = tmp_path / kind.__name__
        if killed_at is not None:
            run_killed_at(killed_at, partial(fit.run, folder=folder, stop_at=killed_at), 1, folder)
        state, *_ = fit.run(World(), folder)
        found[kind] = weights(state), state.rank_state["seen"]
    for ours, theirs in zip(found[InPlace], found[Carrying], strict=True):
        assert torch.equal(ours, theirs)


def test_after_a_first_step_that_is_left_out_there_is_none(tmp_path: Path) -> None:
    made: list[Carrying] = []

    class First(InPlace):
        bad_steps = (0,)

        def __init__(self, make_model: Any) -> None:
            super().__init__(make_model)
            made.append(self)

    Fit(PLAN, task=First).run(World(), tmp_path)
    assert made[0].at_steps[1] is None
    assert made[0].at_steps[2] is not None


@pytest.mark.parametrize("rows", [1, 7])
def test_a_state_without_a_row_for_each_sample_is_refused(rows: int, tmp_path: Path) -> None:
    task = type("Short", (Carrying,), {"rows": rows})
    said = rf"Short.rank_state: 'seen' is of shape \({rows},\); it must"
    with pytest.raises(UserError, match=said) as caught:
        Fit(PLAN, task=task).run(World(), tmp_path)
    assert not caught.value.everywhere  # it may fit another rank's share
