"""TensorBoard as one starts it, on real runs, as one sees it: scalars, pictures, HPARAMS with metrics."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser
from shell import ddptrain

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
WORDS = "recipe=cnn_digits device=cpu train.epochs=2 log.every=10"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of TensorBoard, on two runs that differ in their learning rate."""
    home = tmp_path_factory.mktemp("board")
    for lr in ("0.001", "0.01"):
        ended = ddptrain(home, f"{WORDS} optim.lr={lr} run.dir=runs/lr-{lr}", OMP_NUM_THREADS="1")
        assert ended.code == 0, ended.err
    log = home / "board.txt"
    words = [sys.executable, "-m", "tensorboard.main", "--logdir=runs", "--port=0", "--load_fast=false"]
    with log.open("w") as said:
        board = subprocess.Popen(words, cwd=home, stdout=said, stderr=said)
    try:
        until = time.monotonic() + 120
        while not (found := re.search(r"http://localhost:(\d+)/", log.read_text())):
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        yield found[0]
    finally:
        board.kill()
        board.wait()


def shown(browser: Browser, address: str, tab_name: str, *expected: str) -> str:
    """What can be read in one of its tabs, once all that is expected is there."""
    with browser.tab(1500, 1400) as tab:
        tab.open(f"{address}?darkMode=false#{tab_name}")
        until = time.monotonic() + 120
        while missing := [words for words in expected if words not in (text := tab.text())]:
            assert time.monotonic() < until, f"{tab_name} does not show {missing}:\n{text[:3000]}"
            time.sleep(0.5)
        if tab_name == "images":
            tab.wait_for(_PICTURES)
        if home := os.environ.get("DDPTRAIN_SCREENSHOTS"):
            tab.screenshot(Path(home, f"tensorboard-{tab_name}.png"))
        return text


_PICTURES = """(() => {
  const inside = (node) => [...node.querySelectorAll("*")]
    .flatMap((inner) => [inner, ...(inner.shadowRoot ? inside(inner.shadowRoot) : [])]);
  return inside(document).filter((node) => node.localName === "img" && node.naturalWidth > 50).length >= 2;
})()"""


def test_scalars(browser: Browser, address: str) -> None:
    runs = ("lr-0.001/tensorboard", "lr-0.01/tensorboard")
    shown(browser, address, "timeseries", *runs, "hparam", "perf", "train", "valid", "/accuracy")


def test_pictures(browser: Browser, address: str) -> None:
    shown(browser, address, "images", "train/samples")


def test_hparams_with_metrics(browser: Browser, address: str) -> None:
    """The settings that one looks for are among the few that it shows unasked, each run in its row."""
    text = shown(browser, address, "hparams", "Trial ID", "optim.lr", "hparam/accuracy", "0.0010000")
    table = text[text.index("Trial ID") :]
    for words in ("recipe", "optim.lr", "optim.weight_decay", "train.batch_size", "seed", "lr-0.01/tensorbo"):
        assert words in table
