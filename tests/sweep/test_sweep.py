"""What a sweep starts, skips, tries again and leaves behind."""

import ast
import json
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from running import FAULTY
from shell import ddptrain, early_refusal, in_new_process, refusal, with_imports
from sweeps import SWEPT, events, points, start, statuses, swept_words

from ddptrain.distributed.cpu import cores
from ddptrain.errors import UserError
from ddptrain.text import counted, quoted_if_needed
from ddptrain.tools.sweep.ledger import Ledger, read_ledger

TYPED = f"--multirun --config-dir={SWEPT} recipe=swept device=cpu sweep.dir=sweep"


def test_the_plan_comes_at_once_and_writes_nothing(tmp_path: Path) -> None:
    ended = ddptrain(
        tmp_path, f"{TYPED} task.point=range(12) sweep.dry_run=true sweep.gpus=[0,1] sweep.gpus_per_job=2"
    )
    assert ended.code == 0, ended.err
    first, *jobs = ended.out.splitlines()
    assert first == (
        "sweep sweep: 12 jobs, 12 to run; slots 0, 1 (sweep.gpus): 1 job at once, each 2 ranks and"
        f" {counted(cores(), 'core')}"
    )
    assert len(jobs) == 12
    assert jobs[7].startswith("007  new      python -m ddptrain launch --nproc-per-node=2 ")
    assert jobs[7].endswith("task.point=7 run.dir=sweep/007")
    assert list(tmp_path.iterdir()) == []


def test_the_plan_imports_no_torch(tmp_path: Path) -> None:
    words = f"{TYPED} task.point=range(12) sweep.dry_run=true"
    ended, imported = with_imports(tmp_path, words)
    assert ended.code == 0, ended.err
    assert "ddptrain.tools.sweep.run" in imported
    assert not [name for name in imported if name.partition(".")[0] in ("torch", "numpy", "matplotlib")]


@pytest.mark.long
def test_values_survive_whatever_they_hold(tmp_path: Path) -> None:
    notes = ["a b,c=d", 'it\'s "so"', "{x: [1]}", "tab\tand $HOME `ls`"]
    quoted = ",".join("'" + note.replace("'", "\\'") + "'" for note in notes)
    job = start(tmp_path, swept_words("train.steps=2", f"task.note={quoted}", "sweep.max_parallel=2"))
    assert job.wait() == 0, job.text
    notes_of_jobs = sorted(ast.literal_eval(path.read_text())[1] for path in (tmp_path / "seen").iterdir())
    assert notes_of_jobs == sorted(notes)


@pytest.mark.long
def test_slots_without_a_gpu_are_not_called_gpus(tmp_path: Path) -> None:
    """Never silently on the CPU: not in the table of a sweep either."""
    words = f"--multirun --config-dir={SWEPT} recipe=swept task.point=1,2 sweep.dry_run=true"
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a GPU")
    assert "this machine shows no GPU" in refusal(tmp_path, f"{words} sweep.gpus=[0,1]")
    assert "NO GPU IS USED" in ddptrain(tmp_path, words, CUDA_VISIBLE_DEVICES="0").out
    assert "slots 0, 1 " in ddptrain(tmp_path, f"{words} sweep.gpus=[0,1] device=cpu").out


def test_the_same_sweep_again_runs_only_what_is_left(tmp_path: Path) -> None:
    """The finished are skipped, the failed tried again, new points added; numbers stay."""
    words = swept_words("train.epochs=1", "sweep.gpus=[0,1]", "task.failing=[1]")
    assert start(tmp_path, [*words, "task.point=0,1"]).wait() == 1
    before = points(tmp_path)
    assert statuses(tmp_path) == {0: "done", 1: "failed"}
    job = start(tmp_path, [*words, "task.point=2,1,0"])
    assert job.wait() == 1, job.text
    assert "3 jobs, 1 of them done before" in job.text
    assert statuses(tmp_path) == {0: "done", 1: "failed", 2: "done"}
    assert points(tmp_path) == {**before, 2: "2"}
    started = [event["job"] for event in events(tmp_path, "started")]
    assert sorted(started) == [0, 1, 1, 2]
    assert start(tmp_path, [*words, "task.point=0,2"]).wait() == 0
    assert len(events(tmp_path, "started")) == 4


@pytest.mark.long
def test_a_crash_is_tried_again_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """A user's error is not: it would come again."""
    words = ["--multirun", f"--config-dir={FAULTY}", "recipe=faulty", "device=cpu", "sweep.dir=sweep"]
    job = start(tmp_path, [*words, "task.fault=raise", "task.step=20", "sweep.retries=1"])
    assert job.wait() == 0, job.text
    assert [event["status"] for event in events(tmp_path, "ended")] == ["failed", "done"]
    assert "resumed    sweep/000/checkpoints/step-14" in (tmp_path / "sweep/000/output.txt").read_text()
    (tmp_path / "happened.txt").unlink()
    job = start(tmp_path, [*words, "task.fault=user_error", "task.step=20", "sweep.retries=3"])
    assert job.wait() == 1, job.text
    (ended,) = [event for event in events(tmp_path, "ended") if event["job"] == 1]
    assert (ended["code"], ended["why"]) == (2, "data/7.png: is no picture.")
    job = start(tmp_path, [*words, "task.fault=kill", "task.step=20", "task.once=false"])
    assert job.wait() == 1, job.text
    (ended,) = [event for event in events(tmp_path, "ended") if event["job"] == 2]
    assert (ended["code"], ended["why"]) == (137, "killed by SIGKILL (out of memory?)")


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGTERM, 75, marks=pytest.mark.faults),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.long),
    ],
)
def test_a_stop_reaches_every_job_and_the_sweep_goes_on(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    words = swept_words("task.point=0,1", "task.pace=0.1", "sweep.gpus=[0,1,2,3]", "sweep.gpus_per_job=2")
    job = start(tmp_path, words)
    while not job.process.poll() and sum("plan  " in text for text in outputs(tmp_path)) < 2:
        time.sleep(0.1)
    time.sleep(1.5)
    job.kill(job.process.pid, number)
    assert job.wait(60) == code, job.text
    assert job.pids() == []
    assert statuses(tmp_path) == {0: "stopped", 1: "stopped"}
    # the second where figures are not done within checkpoint.grace, on a busy machine
    said = ("and saved; ", "all is saved; ")
    assert all(any(words in text for words in said) for text in outputs(tmp_path))
    again = start(tmp_path, words)
    assert again.wait() == 0, again.text
    assert statuses(tmp_path) == {0: "done", 1: "done"}
    assert all("resumed    " in text for text in outputs(tmp_path))


@pytest.mark.long
def test_a_job_whose_folder_vanished_still_has_its_last_words(tmp_path: Path) -> None:
    """Those of the file that it went on writing to."""
    words = swept_words("task.point=0,1", "task.failing=[0]", "task.pace=0.05", "sweep.gpus=[0]")
    job = start(tmp_path, words)
    while job.process.poll() is None and not any("epoch 1.00" in text for text in outputs(tmp_path)):
        time.sleep(0.05)
    while (tmp_path / "sweep/000").exists():  # it goes on writing meanwhile
        shutil.rmtree(tmp_path / "sweep/000", ignore_errors=True)
    assert job.wait(120) == 1, job.text
    assert "Traceback" not in job.text
    assert statuses(tmp_path) == {0: "failed", 1: "done"}
    (ended,) = [event for event in events(tmp_path, "ended") if event["job"] == 0]
    assert "sweep/000: was deleted, under the run that was going on in it" in ended["why"]


def outputs(cwd: Path) -> list[str]:
    return [path.read_text() for path in cwd.glob("sweep/*/output.txt")]


@pytest.mark.long
def test_a_sweep_folder_has_one_sweep(tmp_path: Path) -> None:
    job = start(tmp_path, swept_words("task.point=0,1", "task.pace=0.3"))
    job.wait_for("running")
    message = refusal(tmp_path, f"{TYPED} task.point=2,3")
    assert message.startswith(f"sweep.dir=sweep: process {job.process.pid} on ")
    job.kill(job.process.pid, signal.SIGTERM)
    job.wait(60)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("task.point=1,2 sweep.gpus=[0,0]", "sweep.gpus=[0, 0]"),
        ("task.point=1,2 sweep.gpus=all", "sweep.gpus=all"),
        ("task.point=1,2 sweep.gpus=[0] sweep.gpus_per_job=2", "there are only 1"),
        ("task.point=1,2 sweep.gpus_per_job=0", "sweep.gpus_per_job=0"),
        ("task.point=1,2 sweep.gpus_per_job=two", "sweep.gpus_per_job=two"),
        ("task.point=1,2 sweep.gpu_per_job=2", "Did you mean sweep.gpus_per_job?"),
        ("task.point=1,2 sweep.prune=ash", "Did you mean asha?"),
        ("task.point=1,2 sweep.retries=-1", "sweep.retries=-1"),
        ("task.point=1,2 sweep.eta=1", "sweep.eta=1"),
        ("task.point=1,2 sweep.retries=0,1", "sweep.retries: says how"),
        ("task.point=1,2 device=cpu,cuda", "device: all jobs"),
        ("task.point=1,2 device=cuda:1", "sweep.gpus=[1]"),
        ("task.point=1,2 run.resume=never", "run.resume=never"),
        ("task.point=1,2 ++run.resume=never", "run.resume=never"),
        ("task.point=1,2 optim=sgd,sdg", "Did you mean sgd?"),
        ("task.point=range(0)", "make no job"),
        ("task.point=1,2 sweep.dir=a,b", "sweep.dir: says how"),
        ("task.point=1,2 hydra/launcher=basic", "sweep.dir=sweep: says how a sweep is run"),
        ("task.point=1,2 --cfg=job", "--cfg=job: shows one config"),
        ("task.point=1,2 --multirun=true", "--multirun takes no value"),
        ("task.point=1,2 train.epochs=1,fast", "train.epochs"),
        ("task.point=1,2 train.batch_size=16,0", "train.batch_size=0"),
    ],
)
def test_a_wrong_sweep_is_refused_before_a_job_starts(tmp_path: Path, words: str, named: str) -> None:
    assert named in early_refusal(tmp_path, f"{TYPED} {words}")


def test_words_of_a_sweep_are_refused_where_there_is_none(tmp_path: Path) -> None:
    """Or sweep.dry_run would train."""
    for words in ("recipe=cnn_digits sweep.dry_run=true", "launch recipe=cnn_digits sweep.dry_run=true"):
        assert "sweep.dry_run=true: says how a sweep is run" in refusal(tmp_path, words)
    words = "--multirun recipe=cnn_digits seed=1,2"
    assert "Did you mean gpu_pool?" in refusal(tmp_path, f"{words} hydra/launcher=gpu_pol")
    assert "hydra/launcher=../x" in refusal(tmp_path, f"{words} hydra/launcher=../x")


def test_jobs_of_another_launcher_share_no_mirror(tmp_path: Path) -> None:
    words = "--multirun recipe=cnn_digits seed=1,2 hydra/launcher=basic run.mirror=s3://bucket/x"
    assert "run.mirror=s3://bucket/x: the jobs of hydra/launcher=basic" in refusal(tmp_path, words)


def test_a_recipe_starts_no_job_anew(tmp_path: Path) -> None:
    (tmp_path / "own/recipe").mkdir(parents=True)
    recipe = (SWEPT / "recipe/swept.yaml").read_text()
    (tmp_path / "own/recipe/theirs.yaml").write_text(f"{recipe}\nrun:\n  resume: never\n")
    words = f"--multirun --config-dir={SWEPT} --config-dir=own recipe=theirs device=cpu task.point=1,2"
    assert refusal(tmp_path, words).startswith("run.resume=never: the jobs of a sweep have folders")


@pytest.mark.long
def test_a_point_is_known_by_what_its_job_trains_with(tmp_path: Path) -> None:
    """With another optimizer than the recipe's its own rate."""
    words = "--multirun recipe=cnn_digits device=cpu model.width=8 train.steps=1 observers=[] sweep.dir=sweep"
    assert start(tmp_path, f"{words} optim=sgd".split()).wait() == 0
    for rate, left in (("0.1", 0), ("0.003", 1)):
        planned = ddptrain(tmp_path, f"{words} optim=sgd optim.lr={rate} sweep.dry_run=true").out
        assert f"1 job, {left} to run" in planned


@pytest.mark.long
def test_points_of_two_programs_are_two_jobs(tmp_path: Path) -> None:
    """The config of ``--script`` says nothing of what is in it."""
    program = (
        "import ddptrain, torch\nx = torch.randn(20, 3)\n"
        "ddptrain.fit(torch.nn.Linear(3, 2), (x, x[:, :2]), loss=torch.nn.MSELoss(), epochs=1, lr={lr})\n"
    )
    words = (
        "--multirun --script=mine.py optim=sgd optim.lr=0.1,0.2 device=cpu sweep.dry_run=true sweep.dir=sweep"
    )
    (tmp_path / "mine.py").write_text(program.format(lr=1))
    assert start(tmp_path, words.replace("sweep.dry_run=true ", "").split()).wait() == 0
    assert "2 jobs, 0 to run" in ddptrain(tmp_path, words).out
    (tmp_path / "mine.py").write_text(program.format(lr=1) + "\n")
    assert "2 jobs, 2 to run" in ddptrain(tmp_path, words).out


@pytest.mark.long
def test_a_folder_that_the_ledger_does_not_know_is_not_gone_on_in(tmp_path: Path) -> None:
    """It may be of another config: its weights would pass for this one's."""
    assert start(tmp_path, swept_words("train.steps=2", "task.point=0")).wait() == 0
    (tmp_path / "sweep/ledger.jsonl").unlink()
    message = refusal(tmp_path, f"{TYPED} train.steps=2 task.point=1")
    assert message.startswith(
        "sweep.dir=sweep: there is a folder 000 of which its ledger.jsonl knows nothing"
    )


def test_equal_points_and_choices_by_pattern(tmp_path: Path) -> None:
    ended = ddptrain(tmp_path, f"{TYPED} task.point=1,1,1 optim=glob(*m*) sweep.dry_run=true")
    assert ended.code == 0, ended.err
    assert ended.out.startswith("sweep sweep: 5 jobs, 5 to run;")
    chosen = [re.findall(r"optim=(\w+)", line) for line in ended.out.splitlines()]
    assert sorted(chosen[1:]) == [["adam"], ["adamw"], ["muon_with_adamw"], ["muon_with_sgd"], ["rmsprop"]]


@pytest.mark.long
def test_a_torn_line_is_passed_over_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    words = swept_words("train.steps=2", "task.point=0,1")
    assert start(tmp_path, words).wait() == 0
    ledger = tmp_path / "sweep/ledger.jsonl"
    with ledger.open("a") as file:
        file.write('{"event": "ended", "jo')
    assert start(tmp_path, [*words[:-1], "task.point=0,1,2"]).wait() == 0
    assert statuses(tmp_path) == {0: "done", 1: "done", 2: "done"}
    lines = ledger.read_text().splitlines()
    ledger.write_text("\n".join([*lines[:2], "???", *lines[2:]]) + "\n")
    message = refusal(tmp_path, "report sweep")
    assert message.startswith("sweep/ledger.jsonl: line 3 is damaged.")


def test_a_folder_of_any_name(tmp_path: Path) -> None:
    words = [*swept_words("task.point=1", "train.steps=2"), r'sweep.dir="s\a b, \'c,ü"']
    job = start(tmp_path, words)
    assert job.wait() == 0, job.text
    assert [path.name for path in tmp_path.glob("*/000/summary.json")] == ["summary.json"]


@pytest.mark.parametrize("folder", ["a/b-1.c_d", "größe", "a b", "x=1", r"it's\a", "a,b"])
def test_a_path_is_a_value_as_it_is(folder: str) -> None:
    parsed = OverridesParser.create().parse_override(f"run.dir={quoted_if_needed(Path(folder))}")
    assert parsed.value() == folder


def test_how_a_sweep_is_run_is_not_for_a_recipe_to_say(tmp_path: Path) -> None:
    """Its jobs do without what the command line has said instead."""
    (tmp_path / "own/recipe").mkdir(parents=True)
    recipe = (SWEPT / "recipe/swept.yaml").read_text()
    (tmp_path / "own/recipe/theirs.yaml").write_text(f"{recipe}\nsweep:\n  dir: elsewhere\n")
    own = [f"--config-dir={SWEPT}", "--config-dir=own", "recipe=theirs", "device=cpu", "train.steps=2"]
    refused = ddptrain(tmp_path, ["--multirun", *own, "task.point=1"])
    assert refused.code == 2
    assert "sweep.dir=elsewhere: is for the command line alone" in refused.err
    assert start(tmp_path, ["--multirun", *own, "task.point=1", "sweep.dir=sweep"]).wait() == 0


def test_a_ledger_of_an_earlier_version(tmp_path: Path) -> None:
    """Which said nothing of where a job ran."""
    lines = [
        {"event": "job", "job": 0, "key": "k", "words": ["task.point=0"], "time": 1.0},
        {"event": "started", "job": 0, "gpus": [], "on_cpu": True, "time": 2.0},
    ]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (job,) = read_ledger(tmp_path, live=False)
    assert (job.status, job.on) == ("stopped", "local")


def test_a_ledger_on_a_full_disk_is_said(tmp_path: Path) -> None:
    """And what it holds can still be read."""
    ledger = Ledger(tmp_path)
    job = ledger.job("key", ("task.point=1",))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "ledger.jsonl").stat().st_size + 5, hard))
    try:
        with pytest.raises(UserError, match="can't be written"):
            ledger.write(job, "started", on="local", gpus=[], on_cpu=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [known.words for known in read_ledger(tmp_path, live=False)] == [("task.point=1",)]


@pytest.mark.serial
def test_a_thousand_points_are_planned_and_shown_quickly(tmp_path: Path) -> None:
    """Compared with what one point takes, which is the program's own start."""

    def processor_time(words: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        ended = in_new_process(tmp_path, words)
        assert ended.code == 0, ended.err
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before

    plans = [processor_time(f"{TYPED} sweep.dry_run=true task.point=range({n})") for n in (1, 1000, 1)]
    assert plans[1] < 8 * max(plans[0], plans[2])

    facts = {"metric": "loss", "value": 0.5, "higher_is_better": False, "step": 5, "steps": 5}
    for folder, count in (("two", 2), ("thousand", 1000)):
        ledger = Ledger(tmp_path / folder)
        for number in range(count):
            job = ledger.job(f"key{number}", ("recipe=swept", f"task.point={number}"))
            ledger.write(job, "started", on="local", gpus=["0"], on_cpu=True)
            ledger.write(job, "evaluated", **facts)
            ledger.write(job, "ended", status="done", code=0, why="", seconds=1.0, **facts)
    shown = [processor_time(f"report {folder}") for folder in ("two", "thousand", "two")]
    assert shown[1] < 8 * max(shown[0], shown[2])


@pytest.mark.long
def test_report_sorts_by_the_metric(tmp_path: Path) -> None:
    assert start(tmp_path, swept_words("train.epochs=2", "task.point=2,0,1", "task.failing=[1]")).wait() == 1
    ended = ddptrain(tmp_path, "report sweep")
    assert ended.code == 0, ended.err
    rows = [line.split() for line in ended.out.splitlines() if line.strip()[:3] in ("000", "001", "002")]
    assert [row[:3] for row in rows[:3]] == [
        ["001", "done", "task.point=0"],
        ["000", "done", "task.point=2"],
        ["002", "failed", "(1)"],
    ]
    assert "3 jobs: 2 done, 1 failed" in ended.out
    assert "002: ZeroDivisionError: this point was told to fail" in ended.out
    assert ddptrain(tmp_path, "report .").out == ended.out


@pytest.mark.long
def test_a_job_can_be_evaluated_and_keeps_nothing_of_the_sweep_that_ran_it(tmp_path: Path) -> None:
    assert start(tmp_path, swept_words("task.point=0,1")).wait() == 0
    jobs = sorted(path.parent for path in tmp_path.glob("sweep/*/config.yaml"))
    assert len(jobs) == 2
    for job in jobs:
        assert "pruning" not in (job / "config.yaml").read_text() + (job / "command.txt").read_text()
        done = ddptrain(tmp_path, f"evaluate --config-dir={SWEPT} run={job}")
        assert done.code == 0, done.err


@pytest.mark.long
def test_tensorboard_compares_all_jobs(tmp_path: Path) -> None:
    """What its HPARAMS page asks its server for: one session a job, with its settings and metrics."""
    words = swept_words(
        "train.epochs=2", "task.point=0,1", "optim.lr=0.05,0.1", "observers=[console,jsonl,tensorboard,plots]"
    )
    assert start(tmp_path, words).wait() == 0
    log = tmp_path / "board.txt"
    with log.open("w") as said:
        board = subprocess.Popen(
            [sys.executable, "-m", "tensorboard.main", "--logdir=sweep", "--port=0", "--load_fast=false"],
            cwd=tmp_path,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
    try:
        until = time.monotonic() + 60
        while not (address := re.search(r"http://localhost:(\d+)/", log.read_text())):
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        sessions: list[dict[str, Any]] = []
        while len(sessions) < 4:
            assert time.monotonic() < until, sessions
            time.sleep(0.5)
            sessions = session_groups(int(address[1]))
    finally:
        board.kill()
        board.wait()
    tried = {(group["hparams"]["task.point"], group["hparams"]["optim.lr"]) for group in sessions}
    assert tried == {(0, 0.05), (0, 0.1), (1, 0.05), (1, 0.1)}
    assert all(group["metricValues"][0]["name"]["tag"] == "hparam/loss" for group in sessions)


def session_groups(port: int) -> list[dict[str, Any]]:
    request = {
        "allowedStatuses": ["STATUS_SUCCESS", "STATUS_UNKNOWN", "STATUS_RUNNING", "STATUS_FAILURE"],
        "colParams": [{"hparam": "task.point"}, {"hparam": "optim.lr"}],
        "startIndex": 0,
        "sliceSize": 100,
    }
    request = urllib.request.Request(
        f"http://localhost:{port}/data/plugin/hparams/session_groups",
        json.dumps(request).encode(),
        {"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as reply:
        groups: list[dict[str, Any]] = json.load(reply).get("sessionGroups", [])
    return groups


def test_a_foreign_launcher_still_works(tmp_path: Path) -> None:
    """Hydra's own: one job after the other, in this process."""
    words = [word for word in swept_words("train.steps=2", "task.point=0,1") if "sweep." not in word]
    job = start(tmp_path, [*words, "hydra/launcher=basic"])
    assert job.wait() == 0, job.text
    summaries = [json.loads(path.read_text()) for path in tmp_path.glob("runs/swept/*/summary.json")]
    assert [summary["outcome"] for summary in summaries] == ["done", "done"]
