"""Which evaluation is the best, beside five lines that sort."""

import math

from hypothesis import given
from hypothesis import strategies as st
from toy import Fit

from ddptrain.api.world import World
from ddptrain.engine.plan import Plan
from ddptrain.engine.state import TrainState

VALUES = st.sampled_from([0.1, 0.5, 0.9, math.nan])
EVALUATIONS = st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=6)


def new_state(folder: object) -> TrainState:
    plan = Plan(steps=1, train_size=20, batch_size=10, eval_batch_size=40, seed=3)
    return Fit(plan).run(World(), folder)[0]  # type: ignore[arg-type]


def test_of_equal_ones_the_lower_loss_else_the_later(tmp_path_factory: object) -> None:
    state = new_state(tmp_path_factory.mktemp("run"))  # type: ignore[attr-defined]

    @given(evaluations=EVALUATIONS, higher=st.booleans(), resumed_at=st.integers(0, 6))
    def check(evaluations: list[tuple[float, float]], higher: bool, resumed_at: int) -> None:
        state.best, state.best_step, state.best_loss = None, 0, 0.0
        for step, (value, loss) in enumerate(evaluations):
            if step == resumed_at:
                kept = state.state_dict()
                state.best, state.best_step, state.best_loss = None, 0, 0.0
                state.load_state_dict(kept, "test")
            state.step = step
            state.record_if_best({"accuracy": value, "loss": loss}, "accuracy", higher)

        def order(step: int) -> tuple[float, float, int]:
            value, loss = evaluations[step]
            ranked = value if higher else -value
            return (
                -math.inf if math.isnan(value) else ranked,
                -math.inf if math.isnan(loss) else -loss,
                step,
            )

        assert state.best_step == max(range(len(evaluations)), key=order)

    check()


def test_without_a_loss_the_later(tmp_path_factory: object) -> None:
    state = new_state(tmp_path_factory.mktemp("run"))  # type: ignore[attr-defined]
    state.best = None
    for step in range(3):
        state.step = step
        assert state.record_if_best({"accuracy": 0.5}, "accuracy", True)
    assert state.best_step == 2
