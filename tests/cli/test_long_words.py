"""Names, numbers and nestings longer than anything takes: one short message, exit code 2."""

from pathlib import Path

import pytest

from ddptrain.verbs.main import main

LONG = "a" * 300
TRAIN = ["recipe=cnn_digits", "device=cpu", "train.steps=1"]


@pytest.mark.parametrize(
    "words",
    [
        [*TRAIN, f"run.dir={LONG}"],
        [*TRAIN, f"run.dir=x/{LONG}/y"],
        [*TRAIN, f"run.resume={LONG}"],
        [*TRAIN, f"data.root={'é' * 200}"],
        [*TRAIN, f"--config-dir={LONG}"],
        [*TRAIN, "--config-dir", LONG],
        [*TRAIN, "--multirun", f"sweep.dir={LONG}", "seed=1,2"],
        ["evaluate", f"run={LONG}"],
        ["export", "run=x", f"out={LONG}"],
        ["checkpoint", "show", f"run={LONG}"],
        ["report", LONG],
        ["write", "recipe=cnn_digits", f"out={LONG}"],
        [*TRAIN, f"seed={'9' * 5000}"],
        [*TRAIN, f"optim.lr={'1' * 5000}"],
        [*TRAIN, f"data.root={'[' * 5000}"],
        [*TRAIN, f"task={'{a:' * 3000}"],
    ],
    ids=lambda words: " ".join(words)[-330:][:60],
)
def test_it_is_refused(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ddptrain"])
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("ddptrain: ")
    assert len(printed.err) < 400
    assert printed.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
