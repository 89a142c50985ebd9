"""What `run_ranks` says of a rank that fails: with the first one's traceback or exit code."""

import os
import subprocess
import sys
import time

import pytest

from ddptrain.api.world import World
from ddptrain.testing import RankFailed, run_ranks


def test_a_rank_that_dies_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankFailed, match=r"^rank 1 died without a message, with exit code 3$"):
        run_ranks(lambda world: os._exit(3) if world.rank == 1 else time.sleep(2), 2)


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    def rank(world: World) -> None:
        if world.rank == 1:
            raise KeyError("told to fail")

    with pytest.raises(RankFailed, match=r"(?s)^rank 1 raised:.*KeyError: 'told to fail'"):
        run_ranks(rank, 2)


def test_ranks_that_do_not_end_are_named() -> None:
    with pytest.raises(RankFailed, match=r"^ranks \[0\] did not end within 1 s$"):
        run_ranks(lambda world: time.sleep(60 if world.rank == 0 else 0), 1, timeout=1)


EXPORTED_FIRST = """
import torch
from ddptrain.testing import run_ranks

def backward(world=None):
    torch.ones(1, requires_grad=True).backward()

torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
backward()
run_ranks(backward, 2)
"""


def test_ranks_train_after_an_export_and_a_backward_pass_of_the_same_process() -> None:
    subprocess.run([sys.executable, "-c", EXPORTED_FIRST], check=True)
