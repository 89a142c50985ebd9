"""Which strategy a config means."""

import logging

import pytest

from ddptrain.api.world import World
from ddptrain.config.schema import Strategy
from ddptrain.strategies.make_strategy import make_strategy
from ddptrain.strategies.single import Single


@pytest.mark.parametrize(("compression", "notes"), [("none", 0), ("bf16", 1)])
def test_compression_without_ranks_is_remarked_on(
    compression: str, notes: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ddptrain"):
        make_strategy(Strategy(compression=compression), World())
    assert [f"strategy.compression={compression}" in line for line in caplog.messages] == [True] * notes


def test_dp_on_a_cpu_is_single_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ddptrain"):
        strategy = make_strategy(Strategy(name="dp"), World())
    assert isinstance(strategy, Single)
    assert ["strategy=dp" in line and "single" in line for line in caplog.messages] == [True]
