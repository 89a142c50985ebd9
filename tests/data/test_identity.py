"""`Data.identity` covers both parts of every kind of set: a copy elsewhere has the same one, and whatever is
changed in either part, with as many samples as before, makes another one.

A generated product: kinds of sets, parts, and changes.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from named_sets import (
    KINDS,
    SIDE,
    TRAINED,
    Listed,
    box_data,
    coco_of,
    image_data,
    in_csv,
    in_folders,
    masks_in,
    picture,
    prepared,
    shown,
    stream_of,
)
from PIL import Image
from shell import ddptrain, refusal
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from ddptrain.api.recipe import Data
from ddptrain.api.world import World
from ddptrain.data.dataset import DatasetData
from ddptrain.data.detection.coco import CocoFiles
from ddptrain.data.images.csv_labels import CsvLabels
from ddptrain.data.images.dataset import DatasetImages
from ddptrain.data.images.digits import Digits
from ddptrain.data.images.folder import ImageFolder
from ddptrain.data.images.shapes import Shapes
from ddptrain.data.masks.data import MaskData
from ddptrain.data.stream.images import StreamImages
from ddptrain.data.text.corpus import TextFiles
from ddptrain.data.text.data import TextData
from ddptrain.data.text.dates import DatePairs
from ddptrain.errors import UserError
from ddptrain.run.setup import prepare
from ddptrain.testing import RankFailed, run_ranks

# -- sets in files ------------------------------------------------------------------------------------


def _folder(root: Path) -> Data:
    return image_data(ImageFolder(SIDE), root)


def _packed(root: Path) -> Data:
    return image_data(ImageFolder(SIDE, f"{root}-cache"), root)


def _masks(root: Path) -> Data:
    return MaskData(str(root), SIDE, workers=0)


def _coco(root: Path) -> Data:
    return box_data(CocoFiles(*(str(root / part / "boxes.json") for part in ("train", "val"))))


def _text(root: Path) -> Data:
    return TextData(TextFiles(str(root / "text")), root=str(root / "tokens"), valid_piece=64, valid_context=8)


def _write(kind: str, root: Path) -> None:
    parts = ("train", "val")
    if kind in ("imagefolder", "packed"):
        in_folders(root, TRAINED, TRAINED)
    elif kind == "csv":
        in_csv(root, [(own, part) for part in parts for own in shown(TRAINED)])
    elif kind == "masks":
        for part in parts:
            masks_in(root, TRAINED, part)
    elif kind == "coco":
        for part in parts:
            coco_of(root, TRAINED, part)
    else:
        (root / "text").mkdir(parents=True)
        for i in range(21):  # the first and the last are held out
            (root / "text" / f"{i:02}").write_text(f"{i:02} and more words\n" * 20)


FILES: dict[str, tuple[Callable[[Path], Data], str, str]] = {
    "imagefolder": (_folder, "train/bee/4.png", "val/bee/4.png"),
    "packed": (_packed, "train/bee/4.png", "val/bee/4.png"),
    "csv": (lambda root: image_data(CsvLabels(size=SIDE), root), "4.png", "13.png"),
    "masks": (_masks, "train/images/4.png", "val/images/4.png"),
    "coco": (_coco, "train/4.png", "val/4.png"),
    "text": (_text, "text/04", "text/20"),
}  # fmt: skip
"""How a set is read, and a file of each part."""


def _change(file: Path) -> None:
    if file.suffix == ".png":
        noise = torch.randint(256, (SIDE, SIDE, 3), dtype=torch.uint8)
        Image.fromarray(noise.numpy()).save(file)
    else:
        file.write_text(file.read_text().replace("words", "sword"))  # as long as before


def _identity(kind: str, root: Path) -> str:
    found: str = prepared(FILES[kind][0](root)).identity
    assert found
    return found


@pytest.mark.parametrize("kind", FILES)
def test_a_copy_has_the_same_and_a_changed_file_of_either_part_another_one(kind: str, tmp_path: Path) -> None:
    _write(kind, tmp_path / "set")
    own = _identity(kind, tmp_path / "set")
    shutil.copytree(tmp_path / "set", tmp_path / "copy")
    for file in (tmp_path / "copy").rglob("*"):
        os.utime(file, (1, 1))  # a copy on another node has other times
    assert _identity(kind, tmp_path / "copy") == own
    for part, name in enumerate(FILES[kind][1:]):
        other = tmp_path / f"changed-{part}"
        shutil.copytree(tmp_path / "set", other)
        _change(other / name)
        assert _identity(kind, other) != own, name
        changed = (other / name).read_bytes()
        found = set()
        for end in (b"0", b"1"):  # as many bytes
            (other / name).write_bytes(changed + end)
            found.add(_identity(kind, other))
        assert len(found) == 2, name


@pytest.mark.parametrize("kind", ["imagefolder", "csv", "masks"])
@pytest.mark.parametrize("part", [1, 2])
def test_without_what_was_left_out_it_is_that_of_the_set_without_the_file(
    kind: str, part: int, tmp_path: Path
) -> None:
    root = tmp_path / "set"
    _write(kind, root)
    read, name = FILES[kind][0], FILES[kind][part]
    (root / name).write_text("no picture")
    skipping = read(root)
    skipping.on_error = skipping._on_error = "skip"  # type: ignore[attr-defined]
    found = prepared(skipping).identity
    if kind == "csv":
        lines = [line for line in (root / "labels.csv").read_text().splitlines() if not line.startswith(name)]
        (root / "labels.csv").write_text("\n".join(lines))
    elif kind == "masks":
        (root / name.replace("images", "masks")).unlink()
    (root / name).unlink()
    assert found == _identity(kind, root)


def test_a_csvs_lines_count_with_the_same_pictures(tmp_path: Path) -> None:
    rows = [(own, part) for part in ("train", "val") for own in shown(TRAINED)]
    root = in_csv(tmp_path / "set", rows)
    read = lambda: prepared(image_data(CsvLabels(size=SIDE), root)).identity  # noqa: E731
    seen = {read()}
    table = (root / "labels.csv").read_text()
    for change in (("4.png,bee", "4.png,cat"), ("13.png,bee", "13.png,cat")):
        (root / "labels.csv").write_text(table.replace(*change))
        seen.add(read())
    lines = table.splitlines()
    for i, j in ((3, 4), (12, 13)):  # two lines of one class, in another order
        turned = [*lines]
        turned[i], turned[j] = lines[j], lines[i]
        (root / "labels.csv").write_text("\n".join(turned))
        seen.add(read())
    assert len(seen) == 5


# -- sets of any kind ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "coco"])  # coco's has all classes
def test_other_validation_samples_make_another_one(kind: str, tmp_path: Path) -> None:
    made = [
        prepared(KINDS[kind](tmp_path / name, TRAINED, valid)).identity
        for name, valid in (("a", TRAINED), ("b", TRAINED), ("c", TRAINED[:2]), ("d", TRAINED[:2]))
    ]
    assert all(made)
    assert made[0] == made[1] != made[2] == made[3]


def _held(*labels: int, cover: int = 0) -> TensorDataset:
    return TensorDataset(torch.full((len(labels), 2), float(cover)), torch.tensor(labels))


class Files:
    """Names of files, of which it reads one when it is asked for a sample."""

    def __init__(self, root: Path, changed: int | None = None) -> None:
        root.mkdir()
        self.files = [root / f"{i}.txt" for i in range(4)]
        for i, file in enumerate(self.files):
            file.write_text("longer" if i == changed else "short")

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Tensor:
        raise AssertionError("is not read for it")


class Bare:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> Tensor:
        raise AssertionError("is not read for it")


class Columns:
    """What of Hugging Face's datasets is asked: the table of the chosen rows."""

    class Table:
        def __init__(self, rows: list[int]) -> None:
            self._rows = rows

        def column(self, _: int) -> Any:
            return self

        def to_pylist(self) -> list[int]:
            return self._rows

    def __init__(self, rows: list[int]) -> None:
        self._indices = self.Table(rows)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Tensor:
        raise AssertionError("is not read for it")


def test_of_map_style_datasets_of_every_build(tmp_path: Path) -> None:
    base = _held(0, 1, 2, 3)
    same = [lambda: base, lambda: _held(0, 1, 2, 3)]
    others: list[Callable[[], Any]] = [
        lambda: _held(0, 1, 3, 2),
        lambda: _held(0, 1, 2, 3, cover=1),
        lambda: Subset(_held(0, 1, 2, 3), [3, 2, 1, 0]),
        lambda: ConcatDataset([_held(0, 1), _held(3, 2, cover=1)]),
        lambda: Subset(Bare(), [0, 1, 2, 3]),  # nothing tells its samples apart but their numbers
        lambda: Subset(Bare(), [4, 5, 6, 7]),
        lambda: Columns([0, 2, 4, 6]),
        lambda: Columns([1, 3, 5, 7]),
        lambda: Files(tmp_path / "a"),
        lambda: Files(tmp_path / "b", changed=2),
    ]

    def identity(train: Any, valid: Any) -> str:
        found: str = prepared(DatasetData(train, valid, workers=0)).identity
        return found

    assert identity(base, same[0]()) == identity(base, same[1]())
    assert identity(base, same[0]()) == identity(base, Subset(_held(3, 2, 1, 0), [3, 2, 1, 0]))
    assert identity(base, same[0]()) == identity(base, ConcatDataset([_held(0, 1), _held(2, 3)]))
    assert identity(base, Files(tmp_path / "c")) == identity(base, Files(tmp_path / "d"))
    assert len({identity(base, make()) for make in [same[0], *others]}) == 1 + len(others)
    others[-2:] = [lambda: Files(tmp_path / "e"), lambda: Files(tmp_path / "f", changed=2)]
    assert len({identity(make(), base) for make in [same[0], *others]}) == 1 + len(others)


MADE: dict[str, list[Callable[[], Data]]] = {
    "digits": [lambda: image_data(Digits())],
    "shapes": [lambda a=a, b=b: image_data(Shapes(a, b)) for a, b in ((20, 10), (20, 11), (21, 10))],  # type: ignore[misc]
    "dates": [lambda a=a, b=b: DatePairs(a, b) for a, b in ((20, 10), (20, 11), (21, 10))],  # type: ignore[misc]
    "dataset held out": [lambda: DatasetData(Listed(TRAINED * 2, as_tensor=True), workers=0)],
    "images held out": [lambda: image_data(DatasetImages(Listed(TRAINED * 2)))],
}


@pytest.mark.parametrize("kind", MADE)
def test_of_what_the_program_makes(kind: str) -> None:
    found = [prepared(make()).identity for make in MADE[kind]]
    assert all(found)
    assert len(set(found)) == len(found)
    assert found == [prepared(make()).identity for make in MADE[kind]]


# -- ranks, resumes, evaluations ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in FILES if kind != "packed"])
def test_ranks_with_other_validation_files_are_refused(kind: str, tmp_path: Path) -> None:
    """Each of two nodes has a copy of its own."""
    _write(kind, tmp_path / "0")
    shutil.copytree(tmp_path / "0", tmp_path / "1")

    def rank(world: World) -> str:
        data = FILES[kind][0](tmp_path / str(world.rank))
        prepare(data, replace(world, local_rank=0, local_size=1), seed=0)
        return data.identity

    assert len(set(run_ranks(rank, 2))) == 1
    _change(tmp_path / "1" / FILES[kind][2])
    with pytest.raises(RankFailed, match=r"data: rank 1 sees other samples than rank 0"):
        run_ranks(rank, 2)


SMALL = (
    "recipe=cnn_digits device=cpu model.width=8 train.batch_size=8 run.dir=run observers=[jsonl]"
    " data.workers=0"
)
OF_FOLDER = f"{SMALL} data=imagefolder data.root=set data.source.size=32 data.augment.crop=32"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    for i in range(30):  # every tenth is held out: 9, 19, 29 of each class
        for name in TRAINED:
            (folder / "set" / name).mkdir(parents=True, exist_ok=True)
            picture([name], 20 + i).save(folder / "set" / name / f"{i:02}.png")
    done = ddptrain(folder, f"{OF_FOLDER} train.steps=2", **ONE_THREAD)
    assert done.code == 0, done.err
    return folder


CHANGES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda root: None,
    "replaced": lambda root: picture(["dog"], 64).save(root / "bee" / "19.png"),
    "added": lambda root: [picture([name]).save(root / name / "00a.png") for name in TRAINED],
    "removed": lambda root: (root / "ant" / "05.png").unlink(),
}


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_validation_part_is_refused_on_a_resume_and_told_in_an_evaluation(
    change: str, trained: Path, tmp_path: Path
) -> None:
    for name in ("set", "run"):
        shutil.copytree(trained / name, tmp_path / name)
    CHANGES[change](tmp_path / "set")
    found = ddptrain(tmp_path, "evaluate run=run", **ONE_THREAD)
    assert found.code == 0, found.err
    told = "note       data: other samples than run/checkpoints/best was trained with and evaluated on"
    assert (told in found.err) == (change != "nothing")
    if change == "nothing":
        done = ddptrain(tmp_path, f"{OF_FOLDER} train.steps=3", **ONE_THREAD)
        assert done.code == 0, done.err
        return
    said = refusal(tmp_path, f"{OF_FOLDER} train.steps=3", **ONE_THREAD)
    assert "was saved while training on other samples" in said
    assert "Use the same for training and for validation, or start a new run" in said


def test_another_stream_for_validation_is_refused_on_a_resume(tmp_path: Path) -> None:
    for name, mean in (("own", 100.0), ("one", 100.0), ("two", 30.0)):
        stream_of(tmp_path / name, TRAINED, mean=(mean,) * 3, std=(50.0,) * 3)
    words = f"{SMALL} data=stream data.source.cache=null data.source.size=32 data.augment.crop=32"
    words += " data.source.url=own data.source.valid_url"
    done = ddptrain(tmp_path, f"{words}=one train.steps=2", **ONE_THREAD)
    assert done.code == 0, done.err
    said = refusal(tmp_path, f"{words}=two train.steps=3", **ONE_THREAD)
    assert "was saved while training on other samples" in said


def test_a_prepared_stream_differs_in_its_validation_part(tmp_path: Path) -> None:
    urls = [
        str(stream_of(tmp_path / str(i), names)) for i, names in enumerate((TRAINED, TRAINED, TRAINED[:2]))
    ]
    found = [prepared(image_data(StreamImages(urls[0], url, cache=None))).identity for url in urls[1:]]
    assert len(set(found)) == 2
    with pytest.raises(UserError, match=r"data\.source\.valid_url"):
        prepared(image_data(StreamImages(urls[2], urls[0], cache=None)))
