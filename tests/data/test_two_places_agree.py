"""The two parts of a set name their classes: a label means the same in both, or the set is refused.

A generated product: kinds of sets, and how the classes for validation differ. The reference is what the
pictures show: `named_sets` gives each class a colour.
"""

from collections.abc import Callable
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from named_sets import (
    KINDS,
    TRAINED,
    Listed,
    box_data,
    image_data,
    in_csv,
    masks_in,
    prepared,
    seen,
    stream_of,
    stream_of_boxes,
    stream_of_masks,
    told,
)

from ddptrain.data.dataset import DatasetData
from ddptrain.data.images.csv_labels import CsvLabels
from ddptrain.data.images.dataset import DatasetImages
from ddptrain.data.masks.data import MaskData
from ddptrain.data.stream.boxes import StreamBoxes
from ddptrain.data.stream.images import StreamImages
from ddptrain.data.stream.masks import StreamMasks
from ddptrain.data.stream.text import StreamText
from ddptrain.data.text.corpus import TextFiles
from ddptrain.data.text.data import TextData
from ddptrain.errors import UserError

DIFFER = {
    "not": TRAINED,
    "lacks the first": ("bee", "cat"),
    "lacks the middle": ("ant", "cat"),
    "lacks the last": ("ant", "bee"),
    "another order": ("cat", "ant", "bee"),
    "another order, lacks one": ("cat", "ant"),
    "one more": (*TRAINED, "dog"),
    "one more in front": ("aaa", *TRAINED),
    "another word": ("ant", "bee", "cow"),
    "capitals": ("Ant", "bee", "cat"),
}
BY_NAME = (
    *("imagefolder", "csv", "csv, several", "image_dataset", "image_dataset, named"),
    *("stream", "stream, several", "stream_boxes"),
)
"""Kinds whose labels are taken by their names; the others refuse labels that are other numbers."""
PLACES = {
    "imagefolder": ("val", "training folder"),
    "csv": ("split=val", "split=train"),
    "image_dataset": ("data.source.valid", "data.source.dataset"),
    "dataset": ("data.valid", "data.dataset"),
    "stream": ("data.source.valid_url", "data.source.url"),
    "coco": ("val/boxes.json", "train/boxes.json"),
}


def check(kind: str, valid: tuple[str, ...], folder: Path) -> None:
    """The right labels, or a refusal that names both places."""
    same_numbers = valid == TRAINED[: len(valid)] if kind != "coco" else valid == TRAINED
    known = set(valid) <= set(TRAINED)
    if not (known and (kind in BY_NAME or same_numbers)):
        with pytest.raises(UserError) as refused:
            prepared(KINDS[kind](folder, TRAINED, valid))
        places = next(places for name, places in PLACES.items() if kind.startswith(name))
        assert all(place in str(refused.value) for place in places), str(refused.value)
        return
    data = prepared(KINDS[kind](folder, TRAINED, valid))
    found = list(told(data))
    assert len(found) == data.valid_size > 0
    assert all(labels == picture for labels, picture in found), found
    assert set().union(*(labels for labels, _ in found)) == set(valid)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("differ", DIFFER)
def test_a_label_means_the_same_in_both_parts(kind: str, differ: str, tmp_path: Path) -> None:
    check(kind, DIFFER[differ], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_label_means_the_same_in_both_parts_for_any_classes(kind: str, tmp_path: Path) -> None:
    """All orders of all of up to four classes for validation, of five."""
    known = (*TRAINED, "dog", "aaa")
    chosen = [names for count in (1, 2, 3, 4) for names in permutations(known, count)]
    for i, names in enumerate(chosen):
        if len(names) > 1 or kind != "stream_masks":  # masks have two classes at least
            check(kind, names, tmp_path / str(i))


ASKED = {
    "the set's": (TRAINED, True),
    "other words": (("Ameise", "Biene", "Katze"), True),
    "one other word": (("ant", "bee", "Katze"), True),
    "another order": (("cat", "ant", "bee"), False),
    "two in the place of each other": (("bee", "ant", "cat"), False),
    "one elsewhere": (("dog", "ant", "cow"), False),
}
NAMED: dict[str, Callable[[Path, list[str]], Any]] = {
    "image_dataset": lambda root, names: image_data(
        DatasetImages(Listed(TRAINED), Listed(TRAINED, tells=False), names, 8)
    ),
    "dataset": lambda root, names: DatasetData(Listed(TRAINED, as_tensor=True), classes=names, workers=0),
    "stream": lambda root, names: image_data(
        StreamImages(str(stream_of(root / "s", TRAINED)), None, names, 8, cache=None)
    ),
    "stream_masks": lambda root, names: MaskData(
        str(root),
        32,
        names,
        workers=0,
        source=StreamMasks(str(stream_of_masks(root / "s", TRAINED)), cache=None),
    ),
    "masks": lambda root, names: MaskData(
        str(masks_in(masks_in(root, TRAINED, "train"), TRAINED, "val")), 32, names, workers=0
    ),
}  # fmt: skip


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("kind", NAMED)
def test_names_that_are_asked_for_are_those_of_the_set_or_other_words(
    kind: str, asked: str, tmp_path: Path
) -> None:
    """A class's own name for another one would be in every metric, export and prediction."""
    names, right = ASKED[asked]
    if right:
        assert prepared(NAMED[kind](tmp_path, list(names))).outputs == names
        return
    with pytest.raises(UserError, match=r"classes: class \d is '\w+', and '\w+' in the set, where"):
        prepared(NAMED[kind](tmp_path, list(names)))


# -- what the parts may be besides ----------------------------------------------------------------------


def test_csv_leaves_out_test_or_takes_it_where_there_is_no_other(tmp_path: Path) -> None:
    for i, splits in enumerate(product(("val", None), ("test", None), ("train",))):
        rows = [((name,), split) for split in splits if split for name in TRAINED for _ in range(2)]
        held = [split for split in splits[:2] if split][:1]
        more = [(("dog",), "test")] if held == ["val"] and splits[1] else []
        source = CsvLabels(size=8)
        root = in_csv(tmp_path / str(i), [*rows, *more])
        if not held:
            with pytest.raises(UserError, match="no line is left for validation"):
                source.open(root)
            continue
        opened = source.open(root)
        assert [len(opened.train), len(opened.valid)] == [6, 6]
        assert opened.classes == list(TRAINED)  # that of a line which is left out is none
        wanted = [i for i, (_, split) in enumerate(rows) if split == held[0]]
        assert [Path(file).stem for file in opened.valid.files] == [str(i) for i in wanted]  # type: ignore[attr-defined]


KIND_OF = {"classes": stream_of, "boxes": stream_of_boxes, "masks": stream_of_masks}


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One of each kind; one of several labels a picture; one of grey pictures with another mean."""
    root = tmp_path_factory.mktemp("streams")
    made = {kind: str(make(root / kind, TRAINED)) for kind, make in KIND_OF.items()}
    made["several"] = str(stream_of(root / "several", TRAINED, several=True))
    made["dark"] = str(stream_of(root / "dark", TRAINED, mean=(10.0,) * 3, std=(5.0,) * 3))
    made["grey"] = str(stream_of(root / "grey", TRAINED, grey=True))
    (root / "text").write_text("a few words\n" * 400)
    list(TextData(TextFiles(str(root / "text"))).write(root / "tokens"))
    made["tokens"] = str(root / "tokens")
    return made


@pytest.mark.parametrize("kind", ["classes", "boxes", "masks", "tokens", "several"])
@pytest.mark.parametrize("other", ["classes", "boxes", "masks", "tokens", "several"])
def test_a_stream_for_validation_is_of_the_same_kind(streams: dict[str, str], kind: str, other: str) -> None:
    urls = streams[kind], streams[other]
    make = {
        "classes": lambda: image_data(StreamImages(*urls, cache=None)),
        "several": lambda: image_data(StreamImages(*urls, cache=None)),
        "boxes": lambda: box_data(StreamBoxes(*urls, cache=None)),
        "masks": lambda: MaskData(workers=0, source=StreamMasks(*urls, cache=None)),
        "tokens": lambda: TextData(StreamText(*urls, cache=None)),
    }[kind]
    if kind == other:
        prepared(make())
        return
    with pytest.raises(UserError, match=r"data\.source\.valid_url") as caught:
        prepared(make())
    assert "data.source.url" in str(caught.value)


@pytest.mark.parametrize(("one", "other"), [("classes", "dark"), ("dark", "classes"), ("classes", "grey")])
def test_a_streams_normalisation_is_that_of_training(streams: dict[str, str], one: str, other: str) -> None:
    """As a model sees its pictures: float (n, C, H, W), by the mean and deviation of the first."""
    source = StreamImages(streams[one], streams[other], size=8, cache=None)
    data = prepared(image_data(source, resident=False))
    alone = prepared(image_data(StreamImages(streams[one], size=8, cache=None), resident=False))
    assert data.metadata() == alone.metadata()
    [(images, _)] = data.valid_batches([range(data.valid_size)])
    mean, std = (torch.tensor(data.metadata()[name])[:, None, None] for name in ("mean", "std"))
    levels = (images * std + mean).round()
    if other == "grey":  # shown by three equal channels
        assert torch.equal(levels[:, 0], levels[:, 2])
        assert set(levels[:, 0].unique().tolist()) == {20.0, 220.0}
    else:
        assert [seen(pixels) for pixels in levels].count({"cat"}) == 3


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (float, None),  # 0.0, 1.0, 2.0 are whole
        (lambda i: i + 0.5, "must be whole numbers, one for each picture; the first is 0.5"),
        (str, "must be whole numbers, one for each picture; the first is '0'"),
        (lambda i: [i, i], r"must be whole numbers, one for each picture; the first is \[0, 0\]"),
        (lambda i: i + 3, "names 3 classes, so its labels must be 0 to 2; they are 3 to 5"),
        (lambda i: i - 1, "names 3 classes, so its labels must be 0 to 2; they are -1 to 1"),
    ],
)
@pytest.mark.parametrize("lists", [True, False])
def test_labels_of_another_kind(labels: Callable[[int], Any], said: str | None, lists: bool) -> None:
    source = DatasetImages(Listed(TRAINED), Listed(TRAINED, lists=lists, label=labels))
    if said is None:
        assert source.open(Path()).valid.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        return
    with pytest.raises(UserError, match=said):
        source.open(Path())


class Shifted(Listed):
    """Its samples have other labels than its list, as with torchvision's ``target_transform``."""

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        made, label = super().__getitem__(i)
        return made, (label + 1) % 3


class OneHot(Listed):
    """Its list has whole numbers, its samples have one number a class."""

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        made, label = super().__getitem__(i)
        return made, torch.eye(3, dtype=torch.int64)[label]


def test_labels_are_those_of_the_samples() -> None:
    """Or it is said that a dataset has two kinds."""
    transforms = Shifted(TRAINED)
    transforms.target_transform = lambda label: (label + 1) % 3  # type: ignore[attr-defined]
    for name, valid in (("transforms", transforms), ("has no list", Shifted(TRAINED, lists=False))):
        opened = DatasetImages(Listed(TRAINED), valid).open(Path())
        assert opened.valid.labels.tolist() == [1, 1, 1, 2, 2, 2, 0, 0, 0], name
        assert len(opened.valid.images(torch.arange(9))) == 9
    split = DatasetImages(Listed(TRAINED), Shifted(TRAINED)).open(Path()).valid
    with pytest.raises(UserError, match=r"sample 4 has the label 2, and the list of all labels.* says 1"):
        split.images(torch.tensor([4]))
    split = DatasetImages(Listed(TRAINED), OneHot(TRAINED)).open(Path()).valid
    with pytest.raises(
        UserError, match=r"sample 4 has the label tensor\(\[0, 1, 0\]\), and the list .* says 1"
    ):
        split.images(torch.tensor([4]))


def test_a_class_of_held_out_lines_alone_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every tenth line is held out: the eleventh here."""
    names = [TRAINED[i % 2] for i in range(40)]
    for place in range(40):
        own = [*names[:place], "cat", *names[place + 1 :]]
        root = in_csv(tmp_path / str(place), [((name,), "") for name in own])
        lines = (root / "labels.csv").read_text().splitlines()
        (root / "labels.csv").write_text("\n".join(line.rpartition(",")[0] for line in lines))
        with caplog.at_level("WARNING", logger="ddptrain"):
            caplog.clear()
            opened = CsvLabels(size=8).open(root)
        only_there = 2 in opened.valid.labels.tolist()
        assert ("no training picture has cat" in caplog.text) == only_there
        if only_there:
            return
    raise AssertionError("no line is held out")
