"""Log steps are told by a thread: in order, before all that comes after them, and not without bound."""

import io
import logging
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as Terminal

from ddptrain.api.observer import End, Evaluated, Log, Observer, Result, RunInfo, Saved, Start, Times
from ddptrain.api.timing import Lap, Timing
from ddptrain.observe.console import Console
from ddptrain.observe.dispatch import Observers
from ddptrain.observe.jsonl import Jsonl
from ddptrain.observe.lock import lock_folder, unlock_folder
from ddptrain.observe.metrics_file import read_lines

START = Start(0, 100, False, None)
END = End(9, 9, Result("done", {}, {}, True), Times(Timing(), [], 1.0, 1.0))


def logged(step: int) -> Log:
    return Log(step, 0.0, 0, {}, Lap(Timing()))


class Heard(Observer):
    def __init__(self, on_log: Callable[[int], Any] = id) -> None:
        self.events: list[str] = []
        self._on_log = on_log

    def start(self, event: Start) -> None:
        self.events.append("start")

    def log(self, event: Log) -> None:
        self._on_log(event.step)
        self.events.append(f"log {event.step}")

    def evaluated(self, event: Evaluated) -> None:
        self.events.append(f"evaluated {event.step}")

    def saved(self, event: Saved) -> None:
        self.events.append(f"saved {event.step}")

    def end(self, event: End) -> None:
        self.events.append("end")


def test_events_come_in_order_and_a_log_step_soon_by_itself() -> None:
    heard = Heard()
    observers = Observers([heard])
    observers.start(START)
    for step in (1, 2, 3):
        observers.log(logged(step))
    observers.saved(Saved(3, Path()))
    assert heard.events == ["start", "log 1", "log 2", "log 3", "saved 3"]
    observers.log(logged(4))
    deadline = time.monotonic() + 20
    while heard.events[-1] != "log 4":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    observers.log(logged(5))
    observers.end(END)
    assert heard.events[-2:] == ["log 5", "end"]


def test_what_one_changes_is_seen_by_no_other() -> None:
    seen: list[dict[str, float]] = []

    class Meddling(Heard):
        def log(self, event: Log) -> None:
            seen.append(dict(event.values))
            event.values["loss"] = 0.0  # type: ignore[index]

        def evaluated(self, event: Evaluated) -> None:
            seen.append(dict(event.metrics))
            event.metrics["loss"] = 0.0  # type: ignore[index]

    slow = type("Slow", (Meddling,), {"slow": True})
    observers = Observers([Meddling(), Meddling(), slow()])
    observers.start(START)
    log = logged(1)._replace(values={"loss": 1.0})
    observers.log(log)
    evaluated = Evaluated(1, 0.0, 0, {"loss": 2.0}, {}, 0.0, False, Timing(), "loss", False, 9)
    observers.evaluated(evaluated)
    observers.end(END)
    assert sorted(one["loss"] for one in seen) == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert (log.values, evaluated.metrics) == ({"loss": 1.0}, {"loss": 2.0})


def test_one_that_raises_is_dropped_and_the_others_go_on() -> None:
    def broken(step: int) -> None:
        raise OSError("no space left")

    poor, heard = Heard(broken), Heard()
    observers = Observers([poor, heard])
    observers.start(START)
    for step in (1, 2):
        observers.log(logged(step))
    observers.end(END)
    assert poor.events == ["start"]
    assert heard.events == ["start", "log 1", "log 2", "end"]


def test_one_that_ends_the_process_ends_the_training() -> None:
    def leaves(step: int) -> None:
        raise SystemExit(3)

    observers = Observers([Heard(leaves)])
    observers.start(START)

    def train() -> None:
        for step in range(1, 1000):
            observers.log(logged(step))
            time.sleep(0.01)

    with pytest.raises(SystemExit) as raised:
        train()
    assert raised.value.code == 3


def test_the_training_waits_for_one_that_falls_far_behind() -> None:
    heard = Heard(lambda step: time.sleep(0.0005))
    observers = Observers([heard])
    observers.start(START)
    for step in range(3000):
        observers.log(logged(step))
        assert step - len(heard.events) < 1100
    observers.end(END)
    assert heard.events[1:-1] == [f"log {step}" for step in range(3000)]


def test_a_second_training_may_use_them_too() -> None:
    heard = Heard()
    observers = Observers([heard])
    for _ in range(2):
        observers.start(START)
        observers.log(logged(1))
        observers.end(END)
    assert heard.events == ["start", "log 1", "end"] * 2


def test_none_is_told_that_would_write_into_a_folder_that_another_took_meanwhile(tmp_path: Path) -> None:
    """As where the process is stopped between two of them."""
    folder = tmp_path / "run"
    folder.mkdir()
    lock_folder(folder)

    def replace_folder(step: int) -> None:
        if step == 2:
            folder.rename(tmp_path / "old")
            folder.mkdir()

    first, second = Heard(replace_folder), Heard()
    observers = Observers([first, second])
    observers.start(replace(START, run=RunInfo(folder)))
    for step in (1, 2, 3):
        observers.log(logged(step))
    observers.end(END)
    unlock_folder(folder)
    assert first.events == ["start", "log 1", "log 2"]
    assert second.events == ["start", "log 1"]
    assert observers.lost


def test_a_slow_one_has_a_thread_of_its_own_and_is_waited_for_at_the_end() -> None:
    class Slow(Heard):
        slow = True

    slow, heard = Slow(lambda step: time.sleep(0.02)), Heard()
    observers = Observers([slow, heard])
    began = time.monotonic()
    observers.start(START)
    for step in range(50):
        observers.log(logged(step))
    observers.saved(Saved(50, Path()))
    assert time.monotonic() - began < 0.5
    assert heard.events[-1] == "saved 50"
    observers.end(END)
    assert slow.events == ["start", *(f"log {step}" for step in range(50)), "saved 50", "end"]


def test_a_slow_one_that_raises_is_dropped() -> None:
    class Slow(Heard):
        slow = True

    def broken(step: int) -> None:
        raise OSError("no space left")

    slow = Slow(broken)
    observers = Observers([slow])
    observers.start(START)
    observers.log(logged(1))
    observers.end(END)
    assert slow.events == ["start"]


def test_the_progress_bar_goes_on_without_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where all steps since the last log line were left out."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    console = Console()
    console.start(Start(0, 10, False, None))
    console.log(Log(5, 0.5, 50, {"lr": 0.1, "left_out": 5.0}, Lap(Timing(), Timing())))
    console.end(End(5, 10, Result("stopped", {}, {}, True), Times(Timing(), [], 1.0, 1.0)))


def test_the_end_names_the_best_where_it_is_an_earlier_one(caplog: pytest.LogCaptureFixture) -> None:
    for step in (30, 50):
        result = Result("done", {"accuracy": 0.8, "loss": 0.3}, {"accuracy": 0.9, "step": step}, True)
        with caplog.at_level(logging.INFO, "ddptrain"):
            Console().end(End(50, 50, result, Times(Timing(), [], 1.0, 1.0)))
    assert caplog.messages == [
        "done: accuracy 0.8000  loss 0.3000 after 50 steps in 0:01",
        "best       accuracy 0.9000 at step 30 (checkpoint=best)",
        "done: accuracy 0.8000  loss 0.3000 after 50 steps in 0:01",
    ]


def test_metrics_end_where_the_file_is_damaged(tmp_path: Path) -> None:
    """By a crash of the machine; what follows is written anew."""
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1, "split": "train"}\n\x00\xff\xfe')
    assert read_lines(file) == [{"step": 1, "split": "train"}]
    jsonl = Jsonl()
    jsonl.start(Start(1, 9, False, None, RunInfo(tmp_path)))
    jsonl.log(logged(2))
    jsonl.end(END)
    assert [line["step"] for line in read_lines(file)] == [1, 2]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_progress_bar_shows_steps_and_time_left_at_any_width(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal(file=io.StringIO(), force_terminal=True, width=width)
    monkeypatch.setattr("ddptrain.observe.console._terminal", lambda: terminal)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    console = Console()
    console.start(Start(0, 2250, False, None))
    metrics = {"accuracy": 0.9861, "balanced_accuracy": 0.9882, "top5": 1.0, "loss": 0.0239}
    console.evaluated(Evaluated(50, 0.5, 3200, metrics, {}, 0.1, True, Timing(), "accuracy", True, 2250))
    for step in (50, 100):
        console.log(Log(step, 0.5, 64 * step, {"loss": 0.25}, Lap(Timing(), Timing())))
        time.sleep(0.01)
    console.end(End(100, 2250, Result("stopped", {}, {}, True), Times(Timing(), [], 1.0, 1.0)))
    assert isinstance(terminal.file, io.StringIO)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.file.getvalue())
    last = [line for line in re.split(r"[\r\n]+", shown) if line.startswith("training")][-1]
    assert re.search(r" 100/2250 \d+:\d\d:\d\d loss 0.25", last), last
    assert ("evaluated: accuracy 0.9861  balanced_accuracy 0.9882" in last) == (width == 200)
    assert len(last) <= width
