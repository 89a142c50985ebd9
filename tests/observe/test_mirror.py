"""``run.mirror``: what a bucket holds of a run is whole at any moment, and a run goes on from it."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from bucket import BUCKET, Answer, Door, door
from compare import assert_same
from shell import RANK_VARIABLES, Ended, ddptrain, in_new_process, refusal

from ddptrain.data.stream.store import Store
from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.saved_checkpoint import unpack
from ddptrain.errors import UserError
from ddptrain.observe.mirror.layout import INDEX, Index, object_key, opened, read_index
from ddptrain.observe.mirror.restore import local_copy, restore
from ddptrain.observe.mirror.send import Sender, Taken

__all__ = ["door"]  # a fixture

WORDS = (
    "recipe=cnn_digits device=cpu model.width=8 train.steps=60 checkpoint.every=10 log.every=5"
    " train.eval_every=20 observers=[console,jsonl]"
)
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def address(door: Door, tmp_path: Path) -> str:
    """Of a place in the bucket that no other test has: the server's objects outlive it in this process."""
    return f"s3://{BUCKET}/{tmp_path.name}/{time.time_ns()}"


def train(home: Path, run: str, mirror: str, *words: str) -> Ended:
    line = [*WORDS.split(), f"run.dir={run}", f"run.mirror={mirror}", *words]
    return in_new_process(home, line, **ONE_THREAD)


def started(home: Path, words: list[str]) -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    return subprocess.Popen(
        [sys.executable, "-m", "ddptrain", *words], cwd=home, env={**environment, **ONE_THREAD},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def read_until(job: "subprocess.Popen[str]", *words: str) -> list[str]:
    """What it says up to a line with one of the words, or to its end."""
    assert job.stderr is not None
    said = []
    for text in job.stderr:
        said.append(text)
        if any(word in text for word in words):
            break
    return said


def outcome(run: Path) -> dict[str, Any]:
    """What the run has come to: its newest state, the best one's step, and its metrics."""
    saved = Checkpointer(run / "checkpoints", keep=2).newest()
    assert saved is not None
    best = json.loads((run / "checkpoints/best/manifest.json").read_text())["step"]
    return {"state": unpack(saved), "best": best, "metrics": (run / "metrics.jsonl").read_text().splitlines()}


def run_of(folder: Path, step: int) -> None:
    """A run's folder, in small."""
    checkpoint = folder / "checkpoints" / f"step-{step}"
    checkpoint.mkdir(parents=True)
    Checkpointer(folder / "checkpoints", keep=2).save(
        {"model": {}, "optimizer": {}, "step": step}, {"step": step}
    )
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {i}}}\n' for i in range(step)))


def sender_of(run: Path, store: Store, of: str = "run", before: Sequence[str] = (), own: str = "") -> Sender:
    return Sender(run, store, of, before, own or f"process {time.monotonic_ns()}")


def the_index(store: Store) -> Index:
    index = read_index(store)
    assert index is not None
    return index


def test_a_folder_as_mirror(tmp_path: Path) -> None:
    """The index names all there is, by content; what is dropped goes, too."""
    run, store = tmp_path / "run", opened(str(tmp_path / "mirror"), "run.mirror", 1)
    for step in (1, 2):
        run_of(run, step)
    (run / "trackers").mkdir()
    (run / "trackers/run.json").write_text('{"id": "7"}')
    sender = sender_of(run, store)
    assert sender.send() == "step-2"
    first = the_index(store)
    assert first.checkpoints() == ["step-2", "step-1"]
    assert store.keys() == {object_key(path, entry) for path, entry in first.files.items()} | {INDEX}
    assert sender.send() is None
    run_of(run, 3)  # which drops the first
    assert sender.send() == "step-3"
    assert the_index(store).checkpoints() == ["step-3", "step-2"]
    assert store.keys() == {object_key(path, entry) for path, entry in the_index(store).files.items()} | {
        INDEX
    }
    new = tmp_path / "new"
    new.mkdir()
    assert restore(str(tmp_path / "mirror"), new)
    assert "trackers/run.json" in the_index(store).files
    for path in the_index(store).files:
        assert (new / path).read_bytes() == (run / path).read_bytes()
    assert not list(new.rglob("*.part"))


@pytest.mark.parametrize("gone", ["metrics.jsonl", "checkpoints"])
def test_a_folder_that_is_being_deleted_is_not_sent(tmp_path: Path, gone: str) -> None:
    """And one whose file is put back is, again."""
    run, store = tmp_path / "run", opened(str(tmp_path / "mirror"), "run.mirror", 1)
    run_of(run, 1)
    sender = sender_of(run, store)
    sender.send()
    before = the_index(store)
    (run / gone).rename(tmp_path / "aside")
    with pytest.raises(UserError, match="lacks what was there"):
        sender.send()
    assert the_index(store) == before
    assert {object_key(path, entry) for path, entry in before.files.items()} <= store.keys()
    (tmp_path / "aside").rename(run / gone)
    run_of(run, 2)
    assert sender.send() == "step-2"


def test_documents_alone_are_no_reason_to_send_at_once(tmp_path: Path) -> None:
    run, store = tmp_path / "run", opened(str(tmp_path / "mirror"), "run.mirror", 1)
    run_of(run, 1)
    sender = sender_of(run, store)
    sender.send(ended=False)
    (run / "metrics.jsonl").write_text("more\n")
    assert sender.send(ended=False) is None
    assert sender.send(ended=True) == "step-1"


def test_another_run_is_left_alone(tmp_path: Path) -> None:
    store = opened(str(tmp_path / "mirror"), "run.mirror", 1)
    for name in ("one", "other"):
        run_of(tmp_path / name, 1)
    sender_of(tmp_path / "one", store, "one").send()
    before = {path: path.read_bytes() for path in (tmp_path / "mirror").rglob("*") if path.is_file()}
    with pytest.raises(Taken, match="holds another run"):
        sender_of(tmp_path / "other", store, "other").send()
    assert {path: path.read_bytes() for path in (tmp_path / "mirror").rglob("*") if path.is_file()} == before


def test_the_process_that_was_there_before_gives_way(tmp_path: Path) -> None:
    """As of a node that was thought to be lost; whether it had sent anything, or not yet."""
    store = opened(str(tmp_path / "mirror"), "run.mirror", 1)
    run_of(tmp_path / "run", 1)
    before = sender_of(tmp_path / "run", store, own="before")
    silent = sender_of(tmp_path / "run", store, before=["before"], own="silent")
    before.send()
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere")
    run_of(tmp_path / "elsewhere", 2)
    after = sender_of(tmp_path / "elsewhere", store, before=["before"])
    after.send()
    run_of(tmp_path / "run", 3)
    sender_of(tmp_path / "elsewhere", store, before=[the_index(store).sender], own="a restart").send()
    (tmp_path / "elsewhere/log.txt").write_text("more")
    for late in (before, silent, after):
        with pytest.raises(Taken, match="another process sends the run"):
            late.send()
    assert the_index(store).checkpoints() == ["step-2", "step-1"]
    assert store.keys() == {object_key(path, entry) for path, entry in the_index(store).files.items()} | {
        INDEX
    }


def test_one_that_is_overtaken_while_it_uploads_writes_no_index(tmp_path: Path) -> None:
    run, store = tmp_path / "run", opened(str(tmp_path / "mirror"), "run.mirror", 1)
    run_of(run, 1)
    slow, other = sender_of(run, store, own="slow"), sender_of(run, store, before=["slow"], own="other")
    slow.send()
    run_of(run, 2)
    write = store.write

    def overtaken(key: str, content: Any) -> None:
        write(key, content)
        store.write = write  # type: ignore[method-assign]
        other.send()

    store.write = overtaken  # type: ignore[method-assign]
    with pytest.raises(Taken, match="another process sends the run"):
        slow.send()
    index = the_index(store)
    assert index.sender == "other"
    assert {object_key(path, entry) for path, entry in index.files.items()} <= store.keys()


def test_what_is_not_the_runs_is_left_where_it_is(tmp_path: Path) -> None:
    """Files that lie at the address, and other mirrors below it."""
    run, store = tmp_path / "run", opened(str(tmp_path / "mirror"), "run.mirror", 1)
    others = {"thesis.tex", "photos/a.jpg", "log.txt", "checkpoints/step-1/state.pt", "runs/b/mirror.json",
              "runs/b/log.txt@0123456789abcdef", "log.txt@0123"}  # fmt: skip
    for name in others:
        store.write(name, b"mine")
    for step in (1, 2, 3):
        run_of(run, step)
        sender_of(run, store, before=["one"], own="one").send()
    assert others <= store.keys()
    assert all(store.read(name) == b"mine" for name in others)


def test_a_checkpoint_that_lacks_a_file_is_left_out(tmp_path: Path) -> None:
    run, store = tmp_path / "run", opened(str(tmp_path / "mirror"), "run.mirror", 1)
    for step in (1, 2):
        run_of(run, step)
    (run / "checkpoints/step-2/state.pt").unlink()
    assert sender_of(run, store).send() == "step-1"


def test_a_store_that_refuses_to_delete_is_told_of_once(tmp_path: Path) -> None:
    run, store = tmp_path / "run", opened(str(tmp_path / "mirror"), "run.mirror", 1)

    def refuses(keys: Any) -> None:
        if keys:
            raise UserError("refused")

    store.delete = refuses  # type: ignore[method-assign]
    sender, refused = sender_of(run, store), 0
    for step in (1, 2, 3, 4, 5):
        run_of(run, step)
        try:
            sender.send()
        except UserError:
            refused += 1
    assert refused == 1
    assert the_index(store).checkpoints() == ["step-5", "step-4"]


def test_an_outage_while_it_is_restored_leaves_no_checkpoint_out(
    tmp_path: Path, door: Door, address: str
) -> None:
    """Else the run would go on from an older one, and drop the newer ones from its mirror."""
    run, store = tmp_path / "run", opened(address, "run.mirror", 2)
    for step in (1, 2):
        run_of(run, step)
    sender_of(run, store).send()
    (tmp_path / "new").mkdir()
    for fault in (Answer(403), Answer(400, b"<Code>ExpiredToken</Code>")):
        door.fault = lambda path, number, fault=fault: fault if "step-2" in path else None  # type: ignore[misc]
        with pytest.raises(UserError, match="the store refuses it"):
            restore(address, tmp_path / "new")
        assert list((tmp_path / "new").iterdir()) == []
    door.fault = lambda path, number: None
    assert restore(address, tmp_path / "new")


def test_a_mirror_in_the_runs_own_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs/a").mkdir(parents=True)
    for mirror in ("runs/a", "runs/a/mirror", "runs", "."):
        with pytest.raises(UserError, match=r"must be a folder apart from run\.dir="):
            restore(str(tmp_path / mirror), tmp_path / "runs/a")


@pytest.mark.parametrize("harm", ["missing", "cut", "flipped", "swapped"])
def test_a_damaged_checkpoint_is_left_out(tmp_path: Path, harm: str) -> None:
    run, mirror = tmp_path / "run", tmp_path / "mirror"
    store = opened(str(mirror), "run.mirror", 1)
    for step in (1, 2):
        run_of(run, step)
    sender_of(run, store).send()
    index = the_index(store)
    newest, older = (
        mirror / object_key(path, index.files[path])
        for path in ("checkpoints/step-2/state.pt", "checkpoints/step-1/state.pt")
    )
    content = newest.read_bytes()
    if harm == "missing":
        newest.unlink()
    elif harm == "swapped":
        newest.write_bytes(older.read_bytes())
    else:
        newest.write_bytes(content[:-1] if harm == "cut" else bytes([content[0] ^ 1]) + content[1:])
    (tmp_path / "new").mkdir()
    assert restore(str(mirror), tmp_path / "new")
    assert [path.name for path in (tmp_path / "new/checkpoints").iterdir()] == ["step-1"]
    older.unlink()
    shutil.rmtree(tmp_path / "new/checkpoints")
    with pytest.raises(UserError, match=r"Start anew at another address: run\.mirror="):
        restore(str(mirror), tmp_path / "new")
    assert not (tmp_path / "new/checkpoints").exists()


@pytest.mark.parametrize("document", ["log.txt", "config.yaml", "metrics.jsonl"])
def test_a_document_that_is_gone_is_left_out(
    tmp_path: Path, document: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run, mirror = tmp_path / "run", tmp_path / "mirror"
    store = opened(str(mirror), "run.mirror", 1)
    run_of(run, 1)
    for name in ("log.txt", "config.yaml", "metrics.jsonl"):
        (run / name).write_text(name)
    sender_of(run, store).send()
    (mirror / object_key(document, the_index(store).files[document])).unlink()
    (tmp_path / "new").mkdir()
    assert restore(str(mirror), tmp_path / "new")
    for folder in (tmp_path / "new", local_copy(str(mirror), "run")):
        assert (folder / "checkpoints/step-1/manifest.json").exists()
        there = {name for name in ("log.txt", "config.yaml", "metrics.jsonl") if (folder / name).exists()}
        assert there == {"log.txt", "config.yaml", "metrics.jsonl"} - {document}
    assert caplog.text.count("skipping what is damaged") == 2


def test_a_copy_leaves_out_what_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run, mirror = tmp_path / "run", tmp_path / "mirror"
    store = opened(str(mirror), "run.mirror", 1)
    for step in (1, 2):
        run_of(run, step)
    sender_of(run, store).send()
    files = the_index(store).files
    (mirror / object_key("checkpoints/step-2/state.pt", files["checkpoints/step-2/state.pt"])).unlink()
    copy = local_copy(str(mirror), "run")
    assert [path.name for path in (copy / "checkpoints").iterdir()] == ["step-1"]
    (mirror / object_key("checkpoints/step-1/state.pt", files["checkpoints/step-1/state.pt"])).unlink()
    shutil.rmtree(copy)
    with pytest.raises(UserError, match=r"state\.pt"):
        local_copy(str(mirror), "run")


BEGUN = b'{"format": 1, "run": "a", "sender": "b", "files": '


@pytest.mark.parametrize(
    "written",
    [
        b"", b"[]", b'{"format": 2}', BEGUN + b'{"../x": {}}}',
        BEGUN + b'{"../x": {"sha256": "%s", "bytes": 1}}}' % (b"0" * 64),
        BEGUN + b'{"log.txt": {"sha256": "../../x", "bytes": 1}}}',
    ],
)  # fmt: skip
def test_an_index_that_is_none(tmp_path: Path, written: bytes) -> None:
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / INDEX).write_bytes(written)
    with pytest.raises(UserError, match="is not the index of a mirrored run, or is damaged"):
        restore(str(tmp_path / "mirror"), tmp_path / "new")


LONG = ["train.steps=1500", "checkpoint.every=100", "log.every=50", "train.eval_every=300"]


@pytest.mark.long
def test_a_run_goes_on_from_its_mirror_on_an_empty_node(tmp_path: Path, address: str) -> None:
    """Killed, and started by the same line where there is nothing of it: the same bits as undisturbed."""
    assert train(tmp_path, "whole", str(tmp_path / "unused"), *LONG).code == 0
    line = [*WORDS.split(), "run.dir=run", f"run.mirror={address}", *LONG]
    with started(tmp_path, line) as job:
        store, until = opened(address, "run.mirror", 5), time.monotonic() + 60
        while time.monotonic() < until:
            if (index := read_index(store)) is not None and index.checkpoints():
                break
            time.sleep(0.05)
        job.send_signal(signal.SIGKILL)
    shutil.rmtree(tmp_path / "run")
    ended = train(tmp_path, "run", address, *LONG)
    assert ended.code == 0, ended.err
    assert f"restoring  from {address}" in ended.err
    assert "resumed    run/checkpoints/step-" in ended.err
    assert f"mirror     {address} has all of the run" in ended.err
    assert_same(outcome(tmp_path / "run"), outcome(tmp_path / "whole"))
    assert the_index(store).checkpoints() == ["step-1500", "step-1400"]
    assert "never-in-a-log" not in ended.err + (tmp_path / "run/log.txt").read_text()


@pytest.mark.long
def test_other_verbs_take_the_address(tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert train(tmp_path, "run", address).code == 0
    own, theirs = (
        ddptrain(tmp_path, f"evaluate run={run} device=cpu", **ONE_THREAD) for run in ("run", address)
    )
    assert (own.code, theirs.code) == (0, 0), theirs.err
    for name in ("accuracy", "loss", "step"):
        assert json.loads(own.out)[name] == json.loads(theirs.out)[name]
    assert ddptrain(tmp_path, f"report {address} out=page.html").code == 0
    assert (tmp_path / "page.html").stat().st_size > 10_000
    started = train(tmp_path, "other", str(tmp_path / "unused"), f"init.weights={address}", "train.steps=1")
    assert started.code == 0, started.err
    assert "100% of the model" in started.err
    import ddptrain as package

    assert package.load(address).checkpoint.name == "best"
    said = refusal(tmp_path, f"evaluate run=s3://{BUCKET}/nothing device=cpu")
    assert said.startswith(f"run=s3://{BUCKET}/nothing: holds no mirrored run.")


def test_a_report_on_a_mirror_is_not_left_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("one", "two"):
        run_of(tmp_path / name, 1)
        sender_of(tmp_path / name, opened(str(tmp_path / f"there/{name}"), "run.mirror", 1), name).send()
    ended = ddptrain(tmp_path, "report there/one there/two")
    assert (ended.code, ended.err) == (0, "")
    assert "no end known: this is a copy" in ended.out
    assert " one " in ended.out
    assert ended.out.endswith("page  report.html\n")


def test_what_could_not_be_written_leaves_nothing(tmp_path: Path) -> None:
    store = opened(str(tmp_path), "run.mirror", 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(UserError, match=r"a: can't be written \(File too large\)"):
            store.write("a", bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_a_copy_follows_its_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run, store = tmp_path / "run", opened(str(tmp_path / "mirror"), "run.mirror", 1)
    sender = sender_of(run, store)
    for step in (1, 2, 3):
        run_of(run, step)
        sender.send()
        copy = local_copy(str(tmp_path / "mirror"), "run")
        assert copy.name == "mirror"  # by which a report calls it
        kept = sorted(path.name for path in (copy / "checkpoints").iterdir())
        assert kept == [f"step-{i}" for i in range(max(1, step - 1), step + 1)]
        assert (copy / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()


FAULTS = {
    "refused": (Answer(403), "the store refuses it"),
    "broken": (Answer(500), "500"),
    "full": (Answer(507), "507"),
    "gone": (Answer(0), "was not available"),
    "hanging": (Answer(wait=100), "was not available"),
}


@pytest.mark.faults
@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_that_does_not_take_it_harms_no_training(
    tmp_path: Path, door: Door, address: str, fault: str
) -> None:
    """Which says so, and so does its log."""
    answer, said = FAULTS[fault]
    door.write_fault = lambda path, number: answer
    ended = train(tmp_path, "run", address, "train.steps=200")
    assert ended.code == 0, ended.err
    assert (tmp_path / "run/summary.json").is_file()
    assert json.loads((tmp_path / "run/summary.json").read_text())["outcome"] == "done"
    warnings = [line for line in (tmp_path / "run/log.txt").read_text().splitlines() if "mirror     " in line]
    assert f"mirror     {address}" in warnings[0]
    assert any(said in line for line in warnings) or (fault == "hanging" and "still" in warnings[0])


@pytest.mark.faults
def test_a_slow_store_has_all_of_the_run_in_the_end(tmp_path: Path, door: Door, address: str) -> None:
    door.write_fault = lambda path, number: Answer(wait=0.5)
    ended = train(tmp_path, "run", address, "train.steps=200")
    assert ended.code == 0, ended.err
    assert f"mirror     {address} has all of the run" in (tmp_path / "run/log.txt").read_text()
    store = opened(address, "run.mirror", 5)
    assert the_index(store).checkpoints()[0] == "step-200"


@pytest.mark.faults
def test_one_that_fails_for_a_while_is_up_to_date_again(tmp_path: Path, door: Door, address: str) -> None:
    broken = [True]
    door.write_fault = lambda path, number: Answer(403) if broken[0] else None
    line = [*WORDS.split(), "run.dir=run", f"run.mirror={address}", "train.steps=100000"]
    with started(tmp_path, line) as job:
        said = read_until(job, "the store refuses it")
        broken[0] = False
        said += read_until(job, "is up to date again", "nothing more is sent")
        job.terminate()
        said += read_until(job)
    assert any("is up to date again" in text for text in said), said
    assert the_index(opened(address, "run.mirror", 5)).checkpoints()


def test_without_the_store_no_run_begins_on_an_empty_folder(tmp_path: Path, door: Door, address: str) -> None:
    """It might be the run's continuation."""
    door.fault = lambda path, number: Answer(403)
    said = refusal(tmp_path, f"{WORDS} run.dir=run run.mirror={address}")
    assert said.startswith(f"{address}/{INDEX}: the store refuses it (403)")


@pytest.mark.parametrize("wrong", ["ftp://x/y", "s3://user:password@x/y", "s3://x/y?token=1"])
def test_addresses_that_are_none(tmp_path: Path, wrong: str) -> None:
    said = refusal(tmp_path, [*WORDS.split(), "run.dir=run", f"run.mirror='{wrong}'"])
    assert said.startswith("run.mirror=")
    assert "password" not in said.partition("holds a password")[0]


@pytest.mark.faults
def test_another_training_does_not_go_on_from_it(tmp_path: Path) -> None:
    """And nothing of the run stays in its folder."""
    mirror = f"{tmp_path}/mirror"
    assert train(tmp_path, "run", mirror).code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "mirror").rglob("*") if path.is_file()}
    said = train(tmp_path, "other", mirror, "seed=7")
    assert said.code == 2, said.err
    assert "seed" in said.err
    assert not (tmp_path / "other").exists()
    assert {path: path.read_bytes() for path in (tmp_path / "mirror").rglob("*") if path.is_file()} == before


@pytest.mark.long
def test_it_comes_before_the_checkpoint_that_the_line_names(tmp_path: Path) -> None:
    """run.resume=<folder> says where the run began; on an empty node it goes on from where it was."""
    mirror = f"{tmp_path}/mirror"
    assert train(tmp_path, "first", f"{tmp_path}/unused", "train.steps=20").code == 0
    begin = "run.resume=first/checkpoints/step-20"
    assert train(tmp_path, "run", mirror, begin, "train.steps=40").code == 0
    shutil.rmtree(tmp_path / "run")
    ended = train(tmp_path, "run", mirror, begin)
    assert ended.code == 0, ended.err
    assert "resumed    run/checkpoints/step-40" in ended.err


def test_a_folder_is_an_address_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert train(tmp_path, "run", f"{tmp_path}/mirror").code == 0
    ended = ddptrain(tmp_path, f"evaluate run={tmp_path}/mirror device=cpu", **ONE_THREAD)
    assert ended.code == 0, ended.err


def sender_process(run: Path) -> int:
    """The process that sends a run's folder."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"ddptrain.observe.mirror.send" in words and str(run).encode() in words:
                return int(folder.name)
    raise AssertionError("it is not there")


def test_the_process_that_sends_yields_to_the_training(tmp_path: Path) -> None:
    """A nice value counts within a session only: sched(7), "The autogroup feature"."""
    line = [*WORDS.split(), "run.dir=run", f"run.mirror={tmp_path}/mirror", "train.steps=100000"]
    with started(tmp_path, line) as job:
        read_until(job, "step ")
        sender, own = sender_process(tmp_path / "run"), os.getpriority(os.PRIO_PROCESS, job.pid)
        while os.getpriority(os.PRIO_PROCESS, sender) == own:  # it is starting
            time.sleep(0.1)
        assert os.getsid(sender) == os.getsid(job.pid)
        job.terminate()
        job.communicate()


def test_a_process_that_sends_no_more_is_told_of(tmp_path: Path) -> None:
    line = [*WORDS.split(), "run.dir=run", f"run.mirror={tmp_path}/mirror", "train.steps=100000"]
    with started(tmp_path, line) as job:
        read_until(job, "step ")
        os.kill(sender_process(tmp_path / "run"), signal.SIGKILL)
        said = read_until(job, "mirror     ")
        job.terminate()
        job.communicate()
    assert "the process that sends has ended: nothing more is sent" in said[-1]


@pytest.mark.long
def test_each_job_of_a_sweep_has_a_place_of_its_own(tmp_path: Path) -> None:
    words = f"{WORDS} --multirun seed=1,2 sweep.dir=sweep run.mirror={tmp_path}/mirror train.steps=20"
    ended = ddptrain(tmp_path, words, **ONE_THREAD)
    assert ended.code == 0, ended.err
    indexes = sorted((tmp_path / "mirror").rglob(INDEX))
    assert len(indexes) == 2
    for path in indexes:
        assert the_index(opened(str(path.parent), "run.mirror", 1)).checkpoints()[0] == "step-20"
