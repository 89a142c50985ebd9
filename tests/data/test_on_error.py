"""Pictures, masks and samples that can't be read: ``data.on_error``."""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from labelled import truncate
from masked import mask_set
from PIL import Image
from running import outcome
from shell import ddptrain, refusal
from verbs import train_on

from ddptrain.api.world import World
from ddptrain.config.check import checked
from ddptrain.config.compose import composed_tree
from ddptrain.config.schema import Config
from ddptrain.data.dataset import DatasetData
from ddptrain.data.images.augment import Augment
from ddptrain.data.images.csv_labels import CsvLabels
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.dataset import DatasetImages
from ddptrain.data.images.folder import ImageFolder
from ddptrain.data.images.source import ImageSet
from ddptrain.data.left_out import OnError
from ddptrain.data.masks.data import MaskData
from ddptrain.data.stream.images import StreamImages
from ddptrain.data.stream.masks import StreamMasks
from ddptrain.distributed.comm import on_all_ranks
from ddptrain.errors import UserError
from ddptrain.testing import run_ranks
from ddptrain.verbs.argv import parse

SIDE = 24
FORK = multiprocessing.get_context("fork")


def picture(file: Path, seed: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    noise = torch.randint(256, (SIDE, SIDE, 3), generator=torch.Generator().manual_seed(seed))
    Image.fromarray(noise.to(torch.uint8).numpy()).save(file)


def folder_of(root: Path) -> Path:
    """Two classes, 12 pictures each for training and 5 for validation."""
    for part, count in (("train", 12), ("val", 5)):
        for label, name in enumerate(("cat", "dog")):
            for i in range(count):
                picture(root / part / name / f"{i:02}.png", 1000 * (part == "val") + 100 * label + i)
    (root / "labels.csv").write_text(
        "file,label,split\n"
        + "".join(
            f"{file.relative_to(root)},{file.parent.name},{file.parent.parent.name}\n"
            for file in sorted(root.glob("*/*/*.png"))
        )
    )
    return root


BROKEN = ("train/cat/03.png", "train/dog/11.png", "val/cat/00.png", "val/dog/04.png", "val/dog/03.png")


def broken(root: Path) -> Path:
    """Cut short, empty, of text, with a byte changed amid the pixels, and two in a row at the end."""
    files = [root / name for name in BROKEN]
    truncate(files[0])
    files[1].write_bytes(b"")
    files[2].write_text("no picture")
    content = bytearray(files[3].read_bytes())
    content[len(content) // 2] ^= 0xFF
    files[3].write_bytes(content)
    truncate(files[4], 0.3)
    return root


def without(root: Path) -> Path:
    """The same folder without the broken files."""
    for name in BROKEN:
        (root / name).unlink()
        lines = (root / "labels.csv").read_text().splitlines(keepends=True)
        (root / "labels.csv").write_text("".join(line for line in lines if not line.startswith(name)))
    return root


class Pictures:
    """The pictures of a part, as a dataset of one's own. ``ready``: as tensors."""

    classes = ("cat", "dog")

    def __init__(self, folder: Path, ready: bool = False) -> None:
        self.files = sorted(folder.glob("*/*.png"))
        self.targets = [int(file.parent.name == "dog") for file in self.files]
        self.ready = ready

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        with Image.open(self.files[index]) as opened:
            found = opened.convert("RGB")
        if not self.ready:
            return found, self.targets[index]
        pixels = torch.frombuffer(bytearray(found.tobytes()), dtype=torch.uint8).view(SIDE, SIDE, 3)
        return pixels.permute(2, 0, 1) / 255, self.targets[index]


def of_folder(root: Path, on_error: OnError, **options: Any) -> ImageData:
    return ImageData(ImageFolder(SIDE), Augment(2, True), str(root), on_error=on_error, **options)


def of_csv(root: Path, on_error: OnError, **options: Any) -> ImageData:
    return ImageData(CsvLabels(size=SIDE), Augment(2, True), str(root), on_error=on_error, **options)


def of_pictures(root: Path, on_error: OnError, **options: Any) -> ImageData:
    source = DatasetImages(Pictures(root / "train"), Pictures(root / "val"), size=SIDE)
    return ImageData(source, Augment(2, True), str(root), on_error=on_error, **options)


def of_samples(root: Path, on_error: OnError, **options: Any) -> DatasetData:
    options.pop("resident", None)
    train, valid = Pictures(root / "train", ready=True), Pictures(root / "val", ready=True)
    return DatasetData(train, valid, on_error=on_error, **options)


Made = Callable[..., ImageData | DatasetData]
KINDS: list[Made] = [of_folder, of_csv, of_pictures, of_samples]


def evaluated(data: Any) -> list[Any]:
    data.prepare(World(), 0)
    size = data.valid_size
    return list(data.valid_batches([range(i, min(i + 4, size)) for i in range(0, size, 4)]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("resident", [False, True])
def test_what_is_broken_is_left_out_before_the_training(
    tmp_path: Path, kind: Made, resident: bool, caplog: pytest.LogCaptureFixture
) -> None:
    root = broken(folder_of(tmp_path / "set"))
    data = kind(root, "skip", workers=0, resident=resident)
    found = evaluated(data)
    assert (data.train_size, data.valid_size) == (22, 7)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == len(BROKEN), told
    assert all(line.startswith("left out   ") for line in told)
    if kind in (of_folder, of_csv):
        assert all(any(str(root / name) in line for line in told) for name in BROKEN)
    assert ", 5 left out" in data.describe()
    assert data.loading.left_out == 5
    assert_same(evaluated(kind(without(root), "stop", workers=0, resident=resident)), found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_one_ends_the_run_by_default(tmp_path: Path, kind: Made) -> None:
    root = broken(folder_of(tmp_path / "set"))
    with pytest.raises(UserError, match=r"val/cat/00.png|^data\.(source\.)?valid: sample 0") as caught:
        evaluated(kind(root, "stop", workers=0, resident=False))
    assert "data.on_error=skip" in str(caught.value)


def test_masks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = mask_set(tmp_path / "set")
    names = ["train/images/003.png", "train/masks/005.png", "val/masks/002.png"]
    for name in names[:2]:
        truncate(root / name)
    Image.new("L", (3, 3)).save(root / names[2])
    with pytest.raises(UserError, match=r"002.png: has 3x3 pixels") as caught:
        evaluated(MaskData(str(root), 64, workers=0))
    assert "data.on_error=skip" in str(caught.value)
    data = MaskData(str(root), 64, workers=0, on_error="skip")
    found = evaluated(data)
    assert (data.train_size, data.valid_size, data.loading.left_out) == (10, 3, 3)
    assert ", 3 left out" in data.describe()
    assert all(any(name in record.getMessage() for record in caplog.records) for name in names)
    for name in ("train/images/003.png", "train/images/005.png", "val/images/002.png"):
        (root / name).unlink()
    expected = MaskData(str(root), 64, workers=0)
    assert_same(evaluated(expected), found)
    assert expected.identity == data.identity


def test_where_nothing_is_left_the_run_ends(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "set")
    for file in root.glob("val/*/*.png"):
        file.write_text("")
    for kind in KINDS:
        with pytest.raises(UserError, match=r"no sample is left for validation.*\n.*can't be") as caught:
            evaluated(kind(root, "skip", workers=0, resident=False))
        assert "and 7 more" in str(caught.value)


def test_a_class_of_which_nothing_is_left_to_train_on_is_named(tmp_path: Path) -> None:
    """As where its folder is empty, or no line of training has it."""
    root = folder_of(tmp_path / "set")
    for file in root.glob("train/dog/*.png"):
        file.write_text("")
    for source in (ImageFolder(SIDE), CsvLabels(size=SIDE)):
        with pytest.raises(UserError, match="no training sample is left of dog"):
            evaluated(ImageData(source, Augment(), str(root), workers=0, on_error="skip"))


def test_what_is_not_read_beforehand_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.on_error=skip: .*data.source.cache"):
        ImageData(ImageFolder(SIDE, str(tmp_path)), Augment(), on_error="skip")
    with pytest.raises(UserError, match=r"data.on_error=skip: .*stream"):
        ImageData(StreamImages("file:///nowhere"), Augment(), on_error="skip")
    with pytest.raises(UserError, match=r"data.on_error=skip: .*stream"):
        MaskData(source=StreamMasks("file:///nowhere"), on_error="skip")


class Elsewhere(ImageFolder):
    """One node has a bad copy."""

    def __init__(self, is_bad: bool) -> None:
        super().__init__(SIDE)
        self._is_bad = is_bad

    def open(self, root: Path) -> ImageSet:
        if self._is_bad:
            raise UserError("cat/00.png: is missing", everywhere=False)
        return super().open(root)


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_bad_copy_on_one_node_ends_all(tmp_path: Path, on_error: OnError) -> None:
    root = folder_of(tmp_path / "set")

    def rank(world: World) -> str:
        data = ImageData(Elsewhere(world.rank == 1), Augment(), str(root), 0, on_error=on_error)
        try:
            on_all_ranks(world, lambda: data.prepare(world, 3))
        except UserError as error:
            return str(error)
        return ""

    assert all("cat/00.png: is missing" in said for said in run_ranks(rank, 2))


def test_a_dataset_that_only_this_program_knows_is_read_by_processes() -> None:
    class Birds:
        def __len__(self) -> int:
            return 30

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            if index == 4:
                raise OSError("4 is broken")
            return torch.zeros(2), index % 2

    data = DatasetData(Birds(), on_error="skip", workers=1)
    data.prepare(World(), 1)
    assert (data.train_size, data.valid_size) == (26, 3)


def test_a_mistake_in_a_dataset_is_not_left_out(tmp_path: Path) -> None:
    class Wrong(Pictures):
        def __getitem__(self, index: int) -> Any:
            return {}["no such key"]

    data = DatasetData(Wrong(folder_of(tmp_path / "set") / "train"), workers=0, on_error="skip")
    with pytest.raises(KeyError, match="no such key"):
        data.prepare(World(), 0)


def test_labels_that_disagree_are_not_left_out(tmp_path: Path) -> None:
    folder_of(tmp_path / "set")

    class Other(Pictures):
        def __getitem__(self, index: int) -> Any:
            found, label = super().__getitem__(index)
            return found, 1 - label

    source = DatasetImages(Other(tmp_path / "set/train"), size=SIDE)
    with pytest.raises(UserError, match="has the label 1, and the list of all labels"):
        ImageData(source, Augment(), workers=0, on_error="skip").prepare(World(), 0)


def test_blocks_are_written_without_them(tmp_path: Path) -> None:
    root = broken(folder_of(tmp_path / "set"))
    lines = list(of_folder(root, "skip", workers=0).write(tmp_path / "blocks"))
    assert any("22 " in line for line in lines), lines
    streamed = ImageData(
        StreamImages(str(tmp_path / "blocks"), cache=str(tmp_path / "cache"), size=SIDE),
        Augment(2, True), workers=0, resident=False,
    )  # fmt: skip
    expected = evaluated(of_folder(without(root), "stop", workers=0, resident=False))
    found = evaluated(streamed)  # in another order
    assert (streamed.train_size, streamed.valid_size) == (22, 7)
    for batches in (found, expected):
        batches[:] = [sorted(map(float, torch.cat([pixels for pixels, _ in batches]).sum((1, 2, 3))))]
    assert found == expected


RUN = (
    f"recipe=cnn_cifar10 data=imagefolder data.source.size={SIDE} data.augment.crop=2 data.resident=false"
    " model.width=4 device=cpu train.batch_size=8 train.eval_batch_size=4 train.steps=12 train.eval_every=4"
    " checkpoint.every=3 log.every=1 observers=[console,jsonl] strategy=strict"
)


def config(root: Path, run: Path, *more: str) -> Config:
    words = [*RUN.split(), f"data.root={root}", "data.workers=0", f"run.dir={run}", *more]
    before = sys.argv
    found = composed_tree(parse(words))
    sys.argv = before
    assert found is not None
    return checked(found[0])


def test_a_run_names_the_file_that_ends_it(tmp_path: Path) -> None:
    root = broken(folder_of(tmp_path / "set"))
    words = [*RUN.split(), f"data.root={root}", "data.workers=2", "run.dir=run"]
    said = refusal(tmp_path, words, OMP_NUM_THREADS="1")
    assert any(str(root / name) in said for name in BROKEN)
    assert "data.on_error=skip" in said


@pytest.mark.long
def test_runs_are_the_same_on_any_ranks_and_workers(tmp_path: Path) -> None:
    """And those of a set that lacks the files: weights, and each line of the metrics."""
    root = broken(folder_of(tmp_path / "set"))
    runs: dict[Path, Any] = {}
    for ranks in (1, 2):
        run = tmp_path / f"run-{ranks}"
        if ranks == 1:
            train_on(1, config(root, run, "data.on_error=skip"))
        else:  # with loader processes, which a forked rank can't start
            words = f"launch --nproc-per-node=2 {RUN} data.root={root} data.workers=2 run.dir={run}"
            done = ddptrain(tmp_path, f"{words} data.on_error=skip", OMP_NUM_THREADS="1")
            assert done.code == 0, done.err
        told = [line for line in (run / "log.txt").read_text().splitlines() if "left out   " in line]
        assert len(told) == len(BROKEN) + 1, "once each, and their number at the end"
        assert all(any(str(root / name) in line for line in told) for name in BROKEN)
        assert "left out   5 of the set" in told[-1]
        runs[run] = outcome(run)
    train_on(1, config(without(root), tmp_path / "whole"))
    state, lines = outcome(tmp_path / "whole")
    for theirs, metrics in runs.values():
        assert_same(state["model"], theirs["model"])
        assert metrics == lines
    last = json.loads(lines.splitlines()[-1])
    assert (last["split"], last["step"]) == ("valid", 12)


def test_a_run_that_was_killed_goes_on_the_same(tmp_path: Path) -> None:
    root = broken(folder_of(tmp_path / "set"))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train_on(1, config(root, whole, "data.on_error=skip"))
    asked = config(root, killed, "data.on_error=skip")
    job = FORK.Process(target=train_on, args=(1, asked), daemon=False)
    job.start()
    metrics = killed / "metrics.jsonl"
    until = time.monotonic() + 60
    while not (metrics.exists() and '"step": 7' in metrics.read_text()):
        assert time.monotonic() < until
        time.sleep(0.005)
    [rank] = [int(word) for word in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
    os.kill(rank, signal.SIGKILL)
    job.join()
    assert job.exitcode == 1, "train_on tells of the kill"
    train_on(1, asked)
    assert "resumed " in (killed / "log.txt").read_text()
    for a, b in zip(outcome(whole), outcome(killed), strict=True):
        assert_same(a, b)
