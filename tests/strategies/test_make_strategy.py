"""Which strategy a config means."""

import logging

import pytest
from toy import auto

from ddptrain.api.world import World
from ddptrain.run.setup import make_strategy


@pytest.mark.parametrize(("compression", "notes"), [("none", 0), ("bf16", 1)])
def test_compression_without_ranks_is_remarked_on(
    compression: str, notes: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ddptrain"):
        make_strategy(auto(compression=compression), World())
    assert [f"strategy.compression={compression}" in line for line in caplog.messages] == [True] * notes


def test_dp_on_a_cpu_is_single_and_says_so() -> None:
    strategy = make_strategy({"_target_": "ddptrain.strategies.dp.DataParallel"}, World())
    assert strategy.describe().startswith("single")
    assert "strategy=dp" in strategy.describe()
