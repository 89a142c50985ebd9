"""Which strategy a config means."""

import logging

import pytest

from ddptrain.config.schema import Strategy
from ddptrain.distributed.choice import choose_strategy
from ddptrain.distributed.strategy import Single
from ddptrain.distributed.world import World


@pytest.mark.parametrize(("compression", "notes"), [("none", 0), ("bf16", 1)])
def test_compression_without_ranks_is_remarked_on(
    compression: str, notes: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ddptrain"):
        choose_strategy(Strategy(compression=compression), World())
    assert [f"strategy.compression={compression}" in line for line in caplog.messages] == [True] * notes


def test_dp_on_a_cpu_is_single_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ddptrain"):
        strategy = choose_strategy(Strategy(name="dp"), World())
    assert isinstance(strategy, Single)
    assert ["strategy=dp" in line and "single" in line for line in caplog.messages] == [True]
