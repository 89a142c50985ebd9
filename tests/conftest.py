"""One thread for every test: several would fight over the cores of a small, busy machine. And no GPU, but for
tests/gpu and tests/fake_gpu by themselves."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from browser import Browser, headless_chromium
from debian import CannotRun

GPU = [Path(__file__).parent / folder for folder in ("gpu", "fake_gpu")]

PROMISES = [
    *("engine", "parity/test_raw_ddp.py", "strategies", "watchdog", "ranks/test_world_size.py"),
    *("ranks/test_collectives.py", "commands/test_runs.py"),
]
"""What `sh setup.sh test` runs, in at most five minutes on two cores."""

LONG_S = 1200
"""Of a whole training on a busy machine: a limit for hangs."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slice", metavar="K/N", type=_slice,
        help="only the K-th of N equal parts of what -m and -k choose: every N-th test, from the K-th on",
    )  # fmt: skip


def _slice(word: str) -> slice:
    try:
        part, parts = map(int, word.split("/"))
    except ValueError:
        part, parts = 0, 0
    if not 1 <= part <= parts:
        raise argparse.ArgumentTypeError(f"{word}: must be K/N, K from 1 to N")
    return slice(part - 1, None, parts)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    chosen = [Path(__file__).parent / name for name in PROMISES]
    for item in items:
        if any(item.path.is_relative_to(path) for path in chosen):
            item.add_marker(pytest.mark.promises)
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_S))
    yield  # -m and -k take their part
    if asked := config.getoption("slice"):
        kept = items[asked]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_configure(config: pytest.Config) -> None:
    """Where torch sees a GPU, a backward pass, on the CPU too, starts threads that `run_ranks` can't fork
    with. Child processes inherit this."""
    asked = [(config.invocation_params.dir / word.partition("::")[0]).resolve() for word in config.args]
    if not all(any(path.is_relative_to(folder) for folder in GPU) for path in asked):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CUDA reads it when it is first called


def pytest_runtest_setup() -> None:
    torch.set_num_threads(
        1
    )  # a run in this process leaves its own number; a fork would wait for such threads


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """To look at pages with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "*")
        try:
            chromium = headless_chromium(tmp_path_factory.mktemp("chromium"))
            running = chromium.__enter__()
        except CannotRun as reason:
            pytest.skip(str(reason))
        try:
            yield running
        finally:
            chromium.__exit__(None, None, None)
