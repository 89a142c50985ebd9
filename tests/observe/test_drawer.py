"""Figures are drawn by a process beside the training, and nothing that happens to it harms the training."""

import os
import signal
import time
from pathlib import Path

import pytest

from ddptrain.api.recipe import ConfusionMatrix, Curves
from ddptrain.api.world import World
from ddptrain.observe.drawer import Drawer, shared_drawer
from ddptrain.testing import run_ranks

PNG = b"\x89PNG"
MATRIX = ConfusionMatrix([[3, 1], [0, 4]], ["cat", "dog"])


def test_each_name_is_drawn_and_who_asks_for_the_same_figure_gets_the_same_drawing(tmp_path: Path) -> None:
    drawer, drawn = Drawer(), dict[str, bytes]()
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "epoch": 0.5, "samples": 8, "split": "train", "loss": 2.0}\n')
    curves = Curves({"cat": [(0.0, 1.0), (1.0, 0.0)]}, "recall", "precision")
    drawer.draw("confusion", MATRIX, lambda png: drawn.update(plots=png))
    drawer.draw("confusion", MATRIX, lambda png: drawn.update(board=png))
    drawer.draw("precision_recall", curves, lambda png: drawn.update(lines=png))
    drawer.draw_curves(metrics, lambda png: drawn.update(curves=png))
    drawer.finish()
    assert drawn.keys() == {"plots", "board", "lines", "curves"}
    assert drawn["plots"] is drawn["board"]
    assert all(png.startswith(PNG) for png in drawn.values())


def test_of_a_name_only_the_newest_waits() -> None:
    """So evaluating faster than figures are drawn costs no memory and no time at the end."""
    drawer, drawn = Drawer(), list[int]()
    for i in range(200):
        drawer.draw("confusion", ConfusionMatrix([[i]], ["one"]), lambda png, i=i: drawn.append(i))  # type: ignore[misc]
    drawer.finish()
    assert drawn[-1] == 199
    assert len(drawn) < 50


def test_figures_have_their_share_of_the_time_and_the_rest_is_drawn_at_the_end() -> None:
    drawer, drawn = Drawer(), list[int]()
    for i in range(8):
        drawer.draw("confusion", ConfusionMatrix([[i]], ["one"]), lambda png, i=i: drawn.append(i))  # type: ignore[misc]
        time.sleep(0.1)
    assert not drawn  # a figure takes some tenths of a second, 2 % of many seconds
    drawer.finish()
    assert drawn == [7]
    drawer.draw("confusion", MATRIX, lambda png: drawn.append(8))
    time.sleep(0.5)
    assert drawn == [7]  # of a further run in this process likewise
    drawer.finish()
    assert drawn == [7, 8]


def test_what_is_done_with_a_drawing_may_fail() -> None:
    drawer, drawn = Drawer(), list[bytes]()

    def full_disk(png: bytes) -> None:
        raise OSError("no space left")

    drawer.draw("one", MATRIX, full_disk)
    drawer.draw("two", ConfusionMatrix([[1]], ["a"]), drawn.append)
    drawer.finish()
    assert len(drawn) == 1


def test_a_process_that_is_killed_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    drawer, drawn = Drawer(), list[str]()
    drawer.draw("one", MATRIX, lambda png: drawn.append("one"))
    drawer.finish()
    before = time.monotonic()
    os.kill(drawer.pid, signal.SIGKILL)
    drawer.draw("two", ConfusionMatrix([[1]], ["a"]), lambda png: drawn.append("two"))
    drawer.finish()
    assert time.monotonic() - before < 20
    assert drawn == ["one"]
    assert "two was not drawn: the drawing process has ended with exit code -9" in caplog.text


def test_a_forked_process_draws_by_itself() -> None:
    """Its parent's drawer has a thread, which is not there."""
    shared_drawer().draw("one", MATRIX, lambda png: None)
    shared_drawer().finish()

    def drawn(_: World) -> list[bytes]:
        found = list[bytes]()
        shared_drawer().draw("two", MATRIX, found.append)
        shared_drawer().finish()
        os.kill(shared_drawer().pid, signal.SIGKILL)
        return found

    [[png]] = run_ranks(drawn, 1)
    assert png.startswith(PNG)
