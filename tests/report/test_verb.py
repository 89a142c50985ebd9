"""`ddptrain report`: what stands in the terminal, where the page goes, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shell import ddptrain, early_refusal, refusal, without_torch

from ddptrain.tools.report.comparison import direction

MakeRun = Callable[..., Path]


def test_one_run(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("runs/toy/a")
    ended = without_torch(tmp_path, "report runs/toy/a")
    assert (ended.code, ended.err) == (0, "")
    assert "page  runs/toy/a/report.html" in ended.out
    assert "waiting for data 32%: data.workers=4" in ended.out
    rows = [line.split() for line in ended.out.splitlines()]
    assert ["a", "toy", "done", "200", "of", "200", "0:12", "4000", "cpu", "900", "MiB", "32%"] in rows
    at = rows.index(["metric", "last", "best", "at", "step"])
    assert [row[0] for row in rows[at + 2 : at + 4]] == ["accuracy", "loss"]
    assert "<h1>toy: a</h1>" in (tmp_path / "runs/toy/a/report.html").read_text()


def test_several_runs(make_run: MakeRun, tmp_path: Path) -> None:
    for i, name in enumerate(("a", "b", "with blanks")):
        make_run(f"runs/toy/{name}", lr=0.1 * (i + 1), seed=i)
    ended = ddptrain(tmp_path, ["report", "runs/toy/a", "runs/toy/b", "runs/toy/with blanks", "runs/toy/a"])
    assert ended.code == 0, ended.err
    assert f"page  {tmp_path}/runs/toy/report.html" in ended.out
    rows = [line.split() for line in ended.out.splitlines()]
    assert ["run", "optim.lr"] in rows
    assert ["with", "blanks", "0.30000000000000004"] in rows
    accuracy = next(row for row in rows if row[:1] == ["accuracy"])
    assert [word.endswith("*") for word in accuracy[1:]] == [False, True, False, False, False, False]
    assert "toy: 3 runs" in (tmp_path / "runs/toy/report.html").read_text()


def test_an_earlier_page_among_the_folders_is_none_of_them(make_run: MakeRun, tmp_path: Path) -> None:
    """`report runs/*`, a second time."""
    make_run("runs/a")
    make_run("runs/b")
    first = ddptrain(tmp_path, "report runs/a runs/b")
    assert ddptrain(tmp_path, "report runs/a runs/b runs/report.html").out == first.out
    assert "name a run's folder" in early_refusal(tmp_path, "report runs/report.html")
    assert "say which run" in early_refusal(tmp_path, "report runs/report.html to=mlflow")


def test_a_pattern_that_the_shell_has_left_as_it_is(make_run: MakeRun, tmp_path: Path) -> None:
    for name in ("runs/cnn_a/1", "runs/cnn_b/2", "runs/rnn/3", "runs/odd [1]/4"):
        make_run(name)
    (tmp_path / "runs/cnn_b/notes").mkdir()
    found = ddptrain(tmp_path, "report runs/cnn_*/*")  # no shell is between
    assert (found.code, found.err) == (0, "")
    assert found.out == ddptrain(tmp_path, "report runs/cnn_a/1 runs/cnn_b/2").out
    assert ddptrain(tmp_path, ["report", "runs/odd [1]/4"]).code == 0
    nothing = early_refusal(tmp_path, "report runs/gru_*")
    assert nothing == "report 'runs/gru_*': no run's and no sweep's folder matches this pattern.\n"
    assert "Did you mean report 'runs/cnn_*/*'?" in early_refusal(tmp_path, "report runs/cnn_*")


def test_the_page_goes_where_it_is_told(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("one/a")
    make_run("two/b")
    assert ddptrain(tmp_path, ["report", "one/a", "two/b", "out=new/side by side.html"]).code == 0
    assert (tmp_path / "new/side by side.html").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "one", "two"]
    assert ddptrain(tmp_path, "report one/a two/b").code == 0
    assert (tmp_path / "report.html").is_file()


def test_a_run_of_which_little_is_left(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run("a")
    for name in ("config.yaml", "summary.json", "environment.json", "command.txt"):
        (folder / name).unlink()
    ended = ddptrain(tmp_path, "report a")
    assert ended.code == 0, ended.err
    assert "killed, or crashed" in ended.out
    assert "config.yaml is missing" in ended.out


def test_control_characters_reach_no_terminal(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run("a", outcome="\x1b[31mred", verdict="\x1b]0;title\x07")
    (folder / "config.yaml").write_text('recipe: "\\e[2J[bold]x[/bold]"\n')
    ended = ddptrain(tmp_path, "report a")
    assert ended.code == 0, ended.err
    assert "\x1b" not in ended.out
    assert "\x07" not in ended.out
    assert "[bold]x[/bold]" in ended.out


def test_a_strangers_links_lead_to_no_file_of_yours(make_run: MakeRun, tmp_path: Path) -> None:
    """Planted where the page and the plot of a sweep are written, and where they are written aside."""
    sweep_of(tmp_path, make_run, 16)
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    for name in (".report.html.part", "report.html"):
        (tmp_path / "sweep" / name).symlink_to(mine)
    (tmp_path / "sweep/plots").mkdir()
    (tmp_path / "sweep/plots/parallel.png").symlink_to(mine)
    assert ddptrain(tmp_path, "report sweep").code == 0
    assert mine.read_text() == "mine"
    assert (tmp_path / "sweep/plots/parallel.png").read_bytes().startswith(b"\x89PNG")
    assert "sweep/000" in (tmp_path / "sweep/report.html").read_text()
    (tmp_path / "sweep/000").rename(tmp_path / "private")
    (tmp_path / "sweep/000").symlink_to(tmp_path / "private")
    assert ddptrain(tmp_path, "report sweep").code == 0
    assert "sweep/000" not in (tmp_path / "sweep/report.html").read_text()
    (tmp_path / "sweep/plots").rename(tmp_path / "sweep/own")
    (tmp_path / "sweep/plots").symlink_to(tmp_path / "elsewhere")
    ended = ddptrain(tmp_path, "report sweep")
    assert (ended.code, list((tmp_path / "elsewhere").iterdir())) == (0, [])
    assert "plots is a link, which may lead anywhere: nothing is drawn" in ended.out


def test_a_ledger_that_holds_anything_rewrites_no_terminal(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    events: list[dict[str, Any]] = [
        {"event": "job", "job": 0, "key": "a", "words": ["x=\x1b]52;c;AA\x07"]},
        {"event": "started", "job": 0, "on_cpu": True, "gpus": ["\x1b[2J"], "time": 0.0},
        {
            "event": "ended",
            "job": 0,
            "status": "[/bold]\x1b[31m",
            "code": 1,
            "why": "\x1b]0;title\x07",
            "seconds": 1.0,
            "metric": "\x1b[2J",
            "value": 1.0,
        },
    ]
    ledger = tmp_path / "sweep/ledger.jsonl"
    ledger.write_text("".join(json.dumps(event) + "\n" for event in events))
    ended = ddptrain(tmp_path, "report sweep")
    assert ended.code == 0, ended.err
    assert "\x1b" not in ended.out
    assert "title" in ended.out
    for name, wrong in (("status", ["x"]), ("why", 3), ("value", "much"), ("metric", {})):
        events[-1] |= {"status": "done", "why": "", "value": 1.0, "metric": "loss"} | {name: wrong}
        ledger.write_text("".join(json.dumps(event) + "\n" for event in events))
        assert "what it says of job 0 is damaged" in refusal(tmp_path, "report sweep"), name


@pytest.mark.parametrize(
    ("name", "higher"),
    [
        *((name, True) for name in ("accuracy", "balanced_accuracy", "accuracy/cat", "top5", "mIoU", "f1/0")),
        *(
            (name, True)
            for name in ("map", "map50", "map_50_95", "ap_small", "ar100", "mask_map", "exact_match")
        ),
        *((name, False) for name in ("loss", "perplexity", "mean_error", "mape", "MAE", "val_rmse", "mse/x")),
        *((name, None) for name in ("area_covered", "approx", "arrival_time", "topology", "maps")),
    ],
)
def test_the_better_way_is_known_by_whole_words(name: str, higher: bool | None) -> None:
    assert direction(name, []) is higher


def test_a_folder_that_is_none(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("runs/toy/2026-01-01")
    newest = make_run("runs/toy/2026-01-02")
    (newest / "config.yaml").touch()
    assert "there is no such folder. Did you mean report runs/toy?" in early_refusal(
        tmp_path, "report runs/tyo"
    )
    (tmp_path / "empty").mkdir()
    assert early_refusal(tmp_path, "report empty").startswith("report empty: holds no run")
    message = early_refusal(tmp_path, "report runs/toy/2026-01-01/metrics.jsonl")
    assert "Did you mean report runs/toy/2026-01-01?" in message
    assert "For example: report runs/toy/2026-01-02" in early_refusal(tmp_path, "report")


def test_a_folder_of_runs(make_run: MakeRun, tmp_path: Path) -> None:
    for name in "ab":
        make_run(f"runs/toy/{name}")
    (tmp_path / "runs/toy/notes.txt").touch()
    ended = ddptrain(tmp_path, "report runs/toy")
    assert ended.code == 0, ended.err
    assert (tmp_path / "runs/toy/report.html").is_file()
    page = (tmp_path / "runs/toy/report.html").read_text()
    assert "2 runs" in page
    assert ddptrain(tmp_path, "report runs/toy").out == ended.out, "also beside an earlier page"
    assert ddptrain(tmp_path, "report runs").out == ended.out, "further below"
    assert ddptrain(tmp_path, "report run=runs").out == ended.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("report run=b", "report b: there is no such folder"),
        ("report a oot=x.html", "Did you mean out?"),
        ("report a out=a/config.yaml", "name a file that ends in .html"),
        ("report a b", "report b: there is no such folder"),
    ],
)
def test_words_that_are_none_of_its_own(make_run: MakeRun, tmp_path: Path, words: str, said: str) -> None:
    make_run("a")
    assert said in early_refusal(tmp_path, words)


def test_a_page_replaces_earlier_ones_alone(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a")
    mine = tmp_path / "notes.html"
    mine.write_text("my notes")
    assert "notes.html: exists already, and is no report" in refusal(tmp_path, "report a out=notes.html")
    assert mine.read_text() == "my notes"
    mine.rename(tmp_path / "a/report.html")
    assert "a/report.html: exists already, and is no report" in refusal(tmp_path, "report a")
    for _ in range(2):
        assert ddptrain(tmp_path, "report a out=page.html").code == 0


def test_a_page_that_cannot_be_written(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a")
    (tmp_path / "file").write_text("")
    assert "out=<file.html>" in refusal(tmp_path, "report a out=file/page.html")


def sweep_of(home: Path, make_run: MakeRun, jobs: int) -> None:
    """A finished sweep as its ledger tells of it: the later a job, the better."""
    events: list[dict[str, object]] = []
    for i in range(jobs):
        make_run(f"sweep/{i:03}", lr=0.001 * (i + 1), seed=i)
        common = {"job": i, "time": 0.0}
        events.append({"event": "job", "key": f"{i}", "words": ["recipe=toy", f"optim.lr={i}"], **common})
        ended = {"status": "done", "code": 0, "why": "", "seconds": 3.0, "step": 200, "steps": 200}
        value = {"metric": "accuracy", "value": i / jobs, "higher_is_better": True}
        events.append({"event": "ended", **ended, **value, **common})
    (home / "sweep/ledger.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_a_sweep(make_run: MakeRun, tmp_path: Path) -> None:
    sweep_of(tmp_path, make_run, 3)
    ended = ddptrain(tmp_path, "report sweep")
    assert ended.code == 0, ended.err
    assert "3 jobs: 3 done" in ended.out
    assert [line.split()[0] for line in ended.out.splitlines() if line.startswith("  00")] == [
        "002",
        "001",
        "000",
    ]
    assert ended.out.endswith("page  sweep/report.html\n")
    page = (tmp_path / "sweep/report.html").read_text()
    assert "<h1>toy: the sweep sweep</h1>" in page
    assert page.count('class="run"') == 3
    assert ddptrain(tmp_path, "report sweep/ledger.jsonl").out == ended.out


def test_a_large_sweep_shows_its_best_jobs(make_run: MakeRun, tmp_path: Path) -> None:
    sweep_of(tmp_path, make_run, 30)
    ended = ddptrain(tmp_path, "report sweep out=page.html")
    assert "30 jobs: 30 done" in ended.out
    page = (tmp_path / "page.html").read_text()
    assert page.count('class="run"') == 24
    assert "sweep has 30 jobs that have begun; these are the best 24." in page
    assert '"029"' in page
    assert '"005"' not in page


def test_the_best_jobs_are_those_of_the_table(make_run: MakeRun, tmp_path: Path) -> None:
    """With objectives, and of jobs that failed however good they were."""
    sweep_of(tmp_path, make_run, 30)
    ledger = tmp_path / "sweep/ledger.jsonl"
    events = [json.loads(line) for line in ledger.read_text().splitlines()]
    for event in events:
        if event["event"] == "ended":
            event |= {"results": {"loss": event["job"] + 1.0}, "objectives": {"loss": "min"}}
            event["status"] = "failed" if event["job"] == 0 else "done"
    ledger.write_text("".join(json.dumps(event) + "\n" for event in events))
    ended = ddptrain(tmp_path, "report sweep out=page.html")
    table = [line.split()[0] for line in ended.out.splitlines() if line.startswith(("  00", "  01", "  02"))]
    assert table == [*(f"{job:03}" for job in range(1, 30)), "000"]
    page = (tmp_path / "page.html").read_text()
    assert [job for job in table if f'"{job}"' in page] == table[:24]


def test_a_sweep_whose_jobs_have_not_begun(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    event = {"event": "job", "job": 0, "key": "0", "words": ["recipe=toy"], "time": 0.0}
    (tmp_path / "sweep/ledger.jsonl").write_text(json.dumps(event) + "\n")
    ended = ddptrain(tmp_path, "report sweep")
    assert (ended.code, "page" in ended.out) == (0, False)


def test_help(tmp_path: Path) -> None:
    ended = ddptrain(tmp_path, "report --help")
    assert ended.code == 0
    assert "out=<file.html>" in ended.out
