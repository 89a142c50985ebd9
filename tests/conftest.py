"""One thread for every test: several would fight over the cores of a small, busy machine. And no GPU, but for
tests/gpu and tests/fake_gpu by themselves."""

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

GPU = [Path(__file__).parent / folder for folder in ("gpu", "fake_gpu")]

PROMISES = [
    *("doors", "engine", "parity", "strategies", "watchdog", "ranks/test_world_size.py"),
    *("ranks/test_collectives.py", "commands/test_runs.py", "structure"),
]
"""What `sh setup.sh test` runs, in at most five minutes on two cores."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    chosen = [Path(__file__).parent / name for name in PROMISES]
    for item in items:
        if any(item.path.is_relative_to(path) for path in chosen):
            item.add_marker(pytest.mark.promises)


def pytest_configure(config: pytest.Config) -> None:
    """Where torch sees a GPU, a backward pass, on the CPU too, starts threads that `run_ranks` can't fork
    with. Child processes inherit this."""
    asked = [(config.invocation_params.dir / word.partition("::")[0]).resolve() for word in config.args]
    if not all(any(path.is_relative_to(folder) for folder in GPU) for path in asked):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CUDA reads it when it is first called
