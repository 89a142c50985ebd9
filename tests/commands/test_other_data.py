"""Another set than the run's: the model's own normalisation, and classes and outputs that agree, or a
message."""

import json
import shutil
from pathlib import Path

import pytest
from named_sets import TRAINED, coco_of, stream_of
from shell import ddptrain, refusal

STREAM = "data=stream data.source.cache=null data.source.size=32 data.augment.crop=32 data.workers=0"
SMALL = (
    f"recipe=cnn_digits {STREAM} device=cpu model.width=8 train.batch_size=8 run.dir=run observers=[jsonl]"
)
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs, and sets of the same pictures: as trained on, with another mean, with the classes in another
    order, with one more."""
    folder = tmp_path_factory.mktemp("sets")
    stream_of(folder / "own", TRAINED)
    stream_of(folder / "dark", TRAINED, mean=(10.0,) * 3, std=(5.0,) * 3)
    stream_of(folder / "turned", TRAINED[::-1])
    stream_of(folder / "more", (*TRAINED, "dog"))
    done = ddptrain(folder, f"{SMALL} data.source.url=own train.steps=3 checkpoint.every=1", **ONE_THREAD)
    assert done.code == 0, done.err
    return folder


def test_pictures_are_normalised_as_in_training(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    trained = [line["loss"] for line in lines if line["split"] == "valid"][-1]
    other = ddptrain(folder, f"evaluate run=run checkpoint=last {STREAM} data.source.url=dark", **ONE_THREAD)
    assert other.code == 0, other.err
    assert json.loads(other.out)["loss"] == trained
    assert "note       data: normalised by the model's mean" in other.err
    own = ddptrain(folder, f"evaluate run=run checkpoint=last {STREAM} data.source.url=own", **ONE_THREAD)
    assert json.loads(own.out)["loss"] == trained
    assert "note" not in own.err
    fresh = ddptrain(folder, f"{SMALL} run.dir=dark_run data.source.url=dark train.steps=3", **ONE_THREAD)
    assert fresh.code == 0, fresh.err
    lines = [json.loads(line) for line in (folder / "dark_run/metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if line["split"] == "valid"][-1] != trained  # the mean matters


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            "turned",
            "the same 3 in another order, 2 of them elsewhere: output 0 is 'ant' there and 'cat' here",
        ),
        ("more", "none only there, 'dog' only here"),
    ],
)
def test_other_classes_are_refused(folder: Path, other: str, said: str) -> None:
    told = refusal(folder, f"evaluate run=run {STREAM} data.source.url={other}", **ONE_THREAD)
    assert said in told
    resumed = f"{SMALL} data.source.url={other} run.resume=run/checkpoints/step-3 run.dir=new train.steps=4"
    assert "was saved while training on other samples" in refusal(folder, resumed, **ONE_THREAD)


@pytest.mark.parametrize("damaged", [False, True])
def test_weights_for_other_classes_are_noted(folder: Path, tmp_path: Path, damaged: bool) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    if damaged:  # the weights come from the checkpoint before
        shutil.rmtree(tmp_path / "run/checkpoints/best")
        (tmp_path / "run/checkpoints/step-3/manifest.json").write_text("{")
    done = ddptrain(
        tmp_path,
        f"{SMALL} run.dir=new data.source.url={folder}/turned train.steps=1 init.weights=run",
        **ONE_THREAD,
    )
    assert done.code == 0, done.err
    assert "its outputs stand for other classes or characters: the same 3 in another order" in done.err
    assert "The last layer starts from what it was there" in done.err


def test_another_kind_of_data_is_refused(folder: Path, tmp_path: Path) -> None:
    coco_of(tmp_path, TRAINED, "train")
    coco_of(tmp_path, TRAINED, "val")
    files = f"data.source.path={tmp_path}/train/boxes.json data.source.valid_path={tmp_path}/val/boxes.json"
    told = refusal(folder, f"evaluate run=run data=coco {files}", **ONE_THREAD)
    assert "another kind of data" in told


@pytest.mark.parametrize("outputs", [pytest.param(2, marks=pytest.mark.long), 5])
def test_outputs_are_as_many_as_classes_from_the_first_batch(folder: Path, outputs: int) -> None:
    """A model of the user's own, whose number of outputs is not that of the classes."""
    (folder / f"net{outputs}.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        f"    return nn.Sequential(nn.Flatten(), nn.Linear(32 * 32 * 3, {outputs}))\n"
    )
    (folder / "mine/model").mkdir(parents=True, exist_ok=True)
    (folder / f"mine/model/net{outputs}.yaml").write_text(f"_target_: net{outputs}.net\n")
    words = SMALL.replace("model.width=8", f"model=net{outputs} channels_last=false")
    told = refusal(
        folder, f"--config-dir=mine {words} data.source.url=own run.dir=wrong train.steps=2",
        **ONE_THREAD, PYTHONPATH=str(folder),
    )  # fmt: skip
    assert f"has {outputs} outputs, and the data have 3 classes" in told


def test_a_batch_that_is_larger_than_the_set_is_told(folder: Path) -> None:
    done = ddptrain(
        folder, f"{SMALL} run.dir=large data.source.url=own train.steps=1 train.batch_size=18", **ONE_THREAD
    )
    assert done.code == 0, done.err
    assert "note       train.batch_size=18: a step takes 2 epochs" in done.err
