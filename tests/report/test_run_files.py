"""What a report can still say of a run that is half done, damaged, or a stranger's."""

import fcntl
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddptrain.api.timing import PHASES
from ddptrain.tools.report.comparison import (
    NOTHING,
    PARTS,
    compare_settings,
    facts_of,
    metrics,
    ranking,
    short_names,
    time_split,
)
from ddptrain.tools.report.page import page
from ddptrain.tools.report.run_files import CurvePoint, RunFiles, flat, is_run, number, plain, read_run

MakeRun = Callable[..., Path]


def add_line(folder: Path, text: str) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(text)


def shown(*folders: Path) -> str:
    return page([read_run(folder, folder.name) for folder in folders], "title", [])


def test_a_run_as_it_is(make_run: MakeRun) -> None:
    run = read_run(make_run("a", lr=0.3), "a")
    assert run.config == {"recipe": "toy", "optim.lr": "0.3", "train.batch_size": "64"}
    assert run.environment["libraries.torch"] == "2.15.0"
    assert run.command == "python -m ddptrain recipe=toy optim.lr=0.3"
    assert set(run.curves) == {("loss", "train"), ("lr", "train"), ("accuracy", "valid"), ("loss", "valid")}
    assert len(run.curves["loss", "train"]) == 20
    assert run.details == {"AP/owl": CurvePoint(200, 2.5, 0.25)}
    assert (run.state, run.step, run.notes) == ("done", 200, [])


def test_a_run_that_goes_on_and_one_that_was_killed(make_run: MakeRun) -> None:
    folder = make_run("a")
    (folder / "summary.json").unlink()
    add_line(folder, '{"step": 999, "epo')
    assert read_run(folder, "a").state == "killed, or crashed"
    assert read_run(folder, "a").notes == []
    assert read_run(folder, "a").step == 200
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(folder, "a").state == "still going on"
    assert "killed, or crashed" in shown(folder)
    (folder / ".lock").unlink()
    assert read_run(folder, "a").state == "no end known: this is a copy"


def test_a_run_that_was_ended_and_goes_on_is_not_as_its_summary_says(make_run: MakeRun) -> None:
    folder = make_run("a", processes=1)
    spent = {"processes": 2, "seconds": 99.0, "time": {"data": 60.0, "forward": 30.0, "replay": 0.0}}
    (folder / "times.json").write_text(json.dumps(spent))
    add_line(folder, '{"step": 500, "epoch": 9.0, "split": "valid", "accuracy": 0.97}\n')
    run = read_run(folder, "a")
    facts = facts_of(run)
    assert (run.state, facts["steps"], facts["time"]) == ("killed, or crashed", "500", "1:39")
    assert facts["samples/s"] == NOTHING
    assert time_split(run) == {"data": 60.0, "forward": 30.0, "other": 9.0}
    assert "32%" not in shown(folder)  # the first process's advice
    assert metrics([run])[0].name == "accuracy"  # which is still the one that counts
    (folder / "times.json").write_text(json.dumps({**spent, "processes": 1}))
    assert read_run(folder, "a").state == "done"


def test_a_file_that_may_not_be_read_is_a_note(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, read = make_run("a"), Path.read_bytes

    def refused(path: Path) -> bytes:
        if path.name in ("metrics.jsonl", "config.yaml"):
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refused)  # root may read all
    notes = read_run(folder, "a").notes
    assert notes == [f"{name} can't be read (Permission denied)" for name in ("config.yaml", "metrics.jsonl")]


def test_what_is_no_number_is_a_gap(make_run: MakeRun) -> None:
    folder = make_run("a", lines=3)
    add_line(folder, '{"step": 40, "epoch": 0.5, "split": "train", "loss": null, "lr": NaN}\n')
    add_line(folder, '{"step": 50, "epoch": 0.6, "split": "train", "loss": 1e999, "lr": 1%s}\n' % ("0" * 400))
    add_line(folder, '{"step": 60, "epoch": 0.7, "split": "train", "loss": 1.5, "lr": 0.1}\n')
    points = read_run(folder, "a").curves["loss", "train"]
    assert [point.value is None for point in points] == [False, False, False, True, True, False]
    assert [point.value for point in read_run(folder, "a").curves["lr", "train"]][3:5] == [None, None]
    assert shown(folder).count("<circle") > 0


def test_a_resumed_run_tells_each_step_once(make_run: MakeRun) -> None:
    folder = make_run("a", lines=3)
    add_line(folder, '{"step": 20, "epoch": 0.2, "split": "train", "loss": 7.0, "lr": 0.1}\n')
    points = read_run(folder, "a").curves["loss", "train"]
    assert [point.step for point in points] == [10, 20, 30]
    assert points[1].value == 7.0


def test_damaged_lines_are_counted(make_run: MakeRun) -> None:
    folder = make_run("a", lines=3)
    add_line(folder, '???\n[1, 2]\n{"step": "x"}\n' + "[" * 5000 + "\n\n")
    run = read_run(folder, "a")
    assert run.notes == ["metrics.jsonl: 4 damaged lines are left out"]
    assert len(run.curves["loss", "train"]) == 3


@pytest.mark.parametrize(
    "missing", ["config.yaml", "environment.json", "command.txt", "metrics.jsonl", "plots"]
)
def test_a_missing_file_is_missing(make_run: MakeRun, missing: str) -> None:
    folder = make_run("a")
    if missing == "plots":
        (folder / missing).rmdir()
    else:
        (folder / missing).unlink()
    assert (f"{missing} is missing" in shown(folder)) == (missing not in ("metrics.jsonl", "plots"))
    assert "toy" in shown(folder, make_run("b"))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "\0", "a: &a [*a, *a]", "- " * 3000, "\ud800".encode("utf-8", "surrogatepass")],
)
@pytest.mark.parametrize(
    "name", ["config.yaml", "environment.json", "summary.json", "metrics.jsonl", "command.txt"]
)
def test_any_file_may_hold_anything(make_run: MakeRun, name: str, text: str | bytes) -> None:
    folder = make_run("a")
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert "<title>title</title>" in shown(folder)


def test_any_value_of_the_summary_may_be_anything(make_run: MakeRun) -> None:
    names = ("outcome", "steps", "seconds", "best", "higher_is_better", "time", "verdict", "devices", "mfu")
    for value in (None, "x", -1, [1], {"a": {"b": [{}]}}, {"": None}, True, 1e308):
        folder = make_run(f"{value}", **dict.fromkeys(names, value))
        assert "<title>title</title>" in shown(folder)


def test_yaml_that_grows_without_end_is_cut(make_run: MakeRun) -> None:
    folder = make_run("a")
    bomb = "a0: &a0 {x: 1, y: 2}\n" + "".join(
        f"a{i}: &a{i} {{l: *a{i - 1}, r: *a{i - 1}}}\n" for i in range(1, 60)
    )
    (folder / "config.yaml").write_text(bomb + "recipe: toy\nself: &self [*self]\n")
    assert len(read_run(folder, "a").config) <= 2000


def test_metrics_stand_in_the_summary_where_there_are_no_lines(make_run: MakeRun) -> None:
    folder = make_run("a", metrics={"accuracy": 0.75, "loss": None, "AP/owl": 0.1, "note": "x"})
    (folder / "metrics.jsonl").unlink()
    curves = read_run(folder, "a").curves
    assert curves == {
        ("accuracy", "valid"): [CurvePoint(200, None, 0.75)],
        ("loss", "valid"): [CurvePoint(200, None, None)],
    }


def test_a_pipe_or_a_link_is_not_followed(make_run: MakeRun, tmp_path: Path) -> None:
    folder, secret = make_run("a"), tmp_path / "secret"
    secret.write_text("password")
    (folder / "plots/sample.txt").symlink_to(secret)
    os.mkfifo(folder / "plots/pipe.txt")
    (folder / "command.txt").unlink()
    os.mkfifo(folder / "command.txt")
    (folder / "config.yaml").unlink()
    (folder / "config.yaml").symlink_to(secret)
    (folder / ".lock").unlink()
    os.mkfifo(folder / ".lock")
    assert "password" not in shown(folder)


def test_a_link_in_place_of_the_plots_is_not_followed(make_run: MakeRun, tmp_path: Path) -> None:
    folder, notes = make_run("a"), tmp_path / "notes"
    (folder / "plots").rename(notes)
    (notes / "sample.txt").write_text("password")
    assert "password" not in shown(folder)
    (folder / "plots").symlink_to(notes)
    assert "password" not in shown(folder)


def test_is_run(make_run: MakeRun, tmp_path: Path) -> None:
    assert is_run(make_run("a"))
    assert not is_run(tmp_path)


@given(
    st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda s: st.dictionaries(st.text(), s))
)
def test_any_settings_become_lines(tree: object) -> None:
    for key, value in flat(tree if isinstance(tree, dict) else {"": tree}).items():
        assert plain(key) == key
        assert plain(value) == value


@given(st.floats() | st.integers() | st.booleans() | st.text() | st.none())
def test_a_number_is_finite_or_none(value: object) -> None:
    found = number(value)
    assert found is None or abs(found) < float("inf")
    assert not isinstance(value, bool) or found is None


# -- several runs side by side ---------------------------------------------------------------------


def test_differences_come_first() -> None:
    rows = compare_settings([{"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "4", "d": "5"}])
    assert [(row.key, row.values, row.differs) for row in rows] == [
        ("b", ("2", "4"), True),
        ("c", ("3", None), True),
        ("d", (None, "5"), True),
        ("a", ("1", "1"), False),
    ]


def test_the_folder_of_a_run_is_no_difference(make_run: MakeRun) -> None:
    runs = [read_run(make_run(name), name) for name in "ab"]
    assert [row for row in compare_settings([run.config for run in runs]) if row.differs] == []


def test_the_best_run_by_each_metric(make_run: MakeRun) -> None:
    runs = [read_run(make_run(f"{seed}", seed=seed), f"{seed}") for seed in range(4)]
    found = {metric.title: metric for metric in metrics(runs)}
    assert next(iter(found)) == "accuracy"
    best = [max(point.value or 0 for point in run.curves["accuracy", "valid"]) for run in runs]
    assert found["accuracy"].winners == [best.index(max(best))]
    assert found["loss"].higher_is_better is False
    assert [best[i] for i in ranking(runs)] == sorted(best, reverse=True)


@pytest.mark.parametrize(("kept", "best"), [(20, 20), (30, 30), (10, 40), (999, 40), (None, 40)])
def test_of_equal_values_the_best_is_that_of_the_run(make_run: MakeRun, kept: int | None, best: int) -> None:
    """Which takes the one with the lower loss, else the last."""
    run = read_run(make_run("a", best={"accuracy": 0.75, "step": kept}), "a")
    values = {10: 0.5, 20: 0.75, 30: 0.75, 40: 0.75, 50: 0.25}
    run.curves = {("accuracy", "valid"): [CurvePoint(step, None, value) for step, value in values.items()]}
    (metric,) = metrics([run])
    assert metric.scores[0].best == CurvePoint(best, None, 0.75)


def test_a_metric_of_one_run_only_has_no_winner(make_run: MakeRun) -> None:
    one, other = read_run(make_run("a"), "a"), read_run(make_run("b"), "b")
    other.curves = {
        ("perplexity", "valid"): [CurvePoint(1, None, 3.0)],
        ("oddity", "valid"): [CurvePoint(1, None, None)],
    }
    found = {metric.title: metric for metric in metrics([one, other])}
    assert set(found) == {"accuracy", "loss", "perplexity", "oddity", "loss (train)"}
    assert all(metric.winners == [] for metric in found.values())
    assert ranking([other, one]) == [1, 0]


def test_time_adds_up_to_the_whole(make_run: MakeRun) -> None:
    split = time_split(read_run(make_run("a"), "a"))
    assert split == {"data": 4.0, "forward": 3.0, "backward": 5.0, "other": 0.5}
    assert time_split(read_run(make_run("b", time={"own": 1, "data": float("nan")}, seconds=1), "b")) == {
        "own": 1
    }
    assert time_split(RunFiles(Path(), "")) == {}


def test_each_part_of_the_time_has_a_colour_of_its_own(make_run: MakeRun) -> None:
    assert set(PARTS) == set(PHASES)
    folder = make_run("a", time=dict.fromkeys(PHASES, 1.0), seconds=12.0)
    legend = shown(folder).split('<div class="legend">')[1].split("</div>")[0]
    keys = dict(reversed(pair) for pair in re.findall(r'key (k\d+)"></span>([^<]+)<', legend))
    assert len(set(keys.values())) == len(PHASES) + 1
    assert keys["the rest"] == "k11"  # grey
    short = shown(make_run("b", time={"data": 0.0, "forward": 1.0}, seconds=2.0))
    assert "waiting for data" not in short.split('<div class="legend">')[1].split("</div>")[0]


def test_names_are_the_shortest_that_differ() -> None:
    assert short_names([Path("/r/a/1"), Path("/r/a/2")]) == ["1", "2"]
    assert short_names([Path("/r/a/1"), Path("/r/b/1"), Path("/r/b/2")]) == ["a/1", "b/1", "b/2"]
    assert short_names([Path("/r/a")]) == ["a"]


def test_twenty_runs_side_by_side(make_run: MakeRun) -> None:
    html = shown(*(make_run(f"{i:02}", lr=0.01 * i, seed=i) for i in range(20)))
    assert html.count('class="run"') == 20
    assert json.loads(html.split('id="data">')[1].split("</script>")[0])["runs"][19] == "19"
