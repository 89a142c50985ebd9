"""``evaluate``, ``predict`` and ``export`` take a checkpoint's own weights, and say where the command line
asks for others or where their numbers are of something else."""

from pathlib import Path

import pytest
from shell import ddptrain, refusal

SMALL = "recipe=cnn_digits device=cpu model.width=8 train.steps=2 observers=[]"
VERBS = ("evaluate", "predict source=set", "export format=pt2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for words in (f"{SMALL} run.dir=plain", f"{SMALL} run.dir=averaged ema.decay=0.9 +task.tta=1"):
        ended = ddptrain(folder, words, OMP_NUM_THREADS="1")
        assert ended.code == 0, ended.err
    return folder


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("run", "override", "said"),
    [
        ("plain", "ema.decay=0.9", "ema.decay=0.9: the run was trained with null, and"),
        ("averaged", "ema.decay=null", "ema.decay=null: the run was trained with 0.9, and"),
        ("averaged", "ema.decay=0.5", "ema.decay=0.5: the run was trained with 0.9, and"),
        ("plain", "init.weights=w.pth", "init.weights=w.pth: the run was trained with null, and"),
    ],
)
def test_other_weights_are_not_to_be_had(folder: Path, verb: str, run: str, override: str, said: str) -> None:
    told = refusal(folder, f"{verb} run={run} {override}", OMP_NUM_THREADS="1")
    assert told.startswith(said)
    assert "checkpoint convert weights=model" in told


def test_the_runs_own_value_may_be_said(folder: Path) -> None:
    ended = ddptrain(folder, "evaluate run=averaged ema.decay=0.9", OMP_NUM_THREADS="1")
    assert ended.code == 0, ended.err


@pytest.mark.parametrize("run", [pytest.param("plain", marks=pytest.mark.long), "averaged"])
def test_an_export_of_one_view_says_so(folder: Path, run: str) -> None:
    ended = ddptrain(folder, f"export run={run} format=pt2", OMP_NUM_THREADS="1")
    assert ended.code == 0, ended.err
    told = "task.tta=1: evaluate averages 2 views of a picture, and the file takes one"
    assert (told in ended.err) == (run == "averaged")
