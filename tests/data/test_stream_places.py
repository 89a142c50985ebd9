"""Streamed sets that are replaced, or lie where another one lay: nothing kept of one is read for another.

A generated product: kinds of sets of other programs, what happens to them, with a cache and without. The
reference is a first reading, by an empty cache.
"""

import io
import os
import shutil
import tarfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from bucket import BUCKET, bucket
from compare import assert_same
from named_sets import (
    COLOURS,
    SIDE,
    TRAINED,
    Drawn,
    DrawnBoxes,
    box_data,
    image_data,
    masks_in,
    picture,
    prepared,
    told,
)

from ddptrain.api.sampler import Sampler
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.mixing import Mix
from ddptrain.data.images.transforms import Transforms
from ddptrain.data.masks.data import MaskData
from ddptrain.data.stream.boxes import StreamBoxes
from ddptrain.data.stream.images import StreamImages
from ddptrain.data.stream.masks import StreamMasks
from ddptrain.data.stream.text import StreamText
from ddptrain.data.text.corpus import TextFiles
from ddptrain.data.text.data import TextData
from ddptrain.errors import UserError


def _tar(file: Path, shift: int) -> None:
    with tarfile.open(file, "w") as tar:
        for i in range(9):
            label = (i + shift) % 3
            content = io.BytesIO()
            picture([TRAINED[label]]).save(content, "PNG")
            for ending, held in (("png", content.getvalue()), ("cls", str(label).encode())):
                member = tarfile.TarInfo(f"{i:03}.{ending}")
                member.size = len(held)
                tar.addfile(member, io.BytesIO(held))


def _write(kind: str, folder: Path, shift: int) -> None:
    """A set of one part. Of any shift its files have the same names, sizes and times."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "tars":
        for shard in range(2):
            _tar(folder / f"{shard}.tar", shift)
    else:
        names = [*TRAINED[shift:], *TRAINED[:shift]]
        out = folder.with_name(f"{folder.name}-{shift}")
        list(image_data(Drawn(names, names)).write(out))
        for file in (out / "train").iterdir():
            shutil.copyfile(file, folder / file.name)
    for file in folder.iterdir():
        os.utime(file, (1, 1))


def _read(kind: str, folder: str, cache: str | None) -> ImageData:
    url = f"{folder}/{{0..1}}.tar" if kind == "tars" else folder
    source = StreamImages(url, url, classes=list(TRAINED), size=SIDE, cache=cache)
    return prepared(image_data(source, resident=False))  # type: ignore[no-any-return]


def _held(data: ImageData) -> tuple[list[int], bytes]:
    """Labels and pixels of all samples."""
    [(images, labels)] = data.valid_batches([range(data.valid_size)])
    return labels.tolist(), images.numpy().tobytes()


def _replaced(kind: str, root: Path) -> str:
    _write(kind, root / "set", 1)
    for file in (root / "set").iterdir():
        os.utime(file, (2, 2))
    return "set"


def _linked(kind: str, root: Path) -> str:
    (root / "set").rename(root / "before")
    _write(kind, root / "after", 1)
    (root / "set").symlink_to("after")
    return "set"


def _from_elsewhere(kind: str, root: Path) -> str:
    (root / "elsewhere").mkdir()
    os.chdir(root / "elsewhere")
    _write(kind, root / "elsewhere/set", 1)
    return "set"


HAPPENS: dict[str, Callable[[str, Path], str]] = {
    "replaced": _replaced, "linked": _linked, "from elsewhere": _from_elsewhere,
}  # fmt: skip


@pytest.mark.parametrize("mix", [Mix(1.0, 0), Mix(0, 1.0)], ids=["mixup", "cutmix"])
def test_partners_are_of_the_block_also_where_the_set_is_in_memory(mix: Mix, tmp_path: Path) -> None:
    names = list(COLOURS)
    list(image_data(Drawn(names, names[:2])).write(tmp_path / "set", block_mb=0.002))
    assert len(list((tmp_path / "set/train").glob("*.bin"))) > 1
    batches = []
    for resident in (False, True):
        source = StreamImages(str(tmp_path / "set"), size=SIDE, cache=None)
        data = prepared(ImageData(source, Transforms(mix=mix), workers=0, resident=resident))
        batches.append(list(data.train_batches(Sampler(data.train_size, 8, 3), range(3))))
    assert_same(*batches)


@pytest.mark.parametrize(
    ("kind", "cached", "happens"),
    [case for case in product(["tars", "litdata"], [True, False], HAPPENS) if case[:2] != ("tars", False)],
)
def test_another_set_of_equal_names_and_sizes_is_read_anew(
    kind: str, cached: bool, happens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _write(kind, tmp_path / "set", 0)
    files = {file.name: file.read_bytes() for file in (tmp_path / "set").iterdir()}
    cache = str(tmp_path / "cache") if cached else None
    first = _read(kind, "set", cache)
    before = _held(first)
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "set").iterdir()}
    assert _held(_read(kind, "set", cache)) == before
    url = HAPPENS[happens](kind, tmp_path)
    monkeypatch.chdir(Path.cwd())
    found = _read(kind, url, cache)
    assert _held(found) != before
    assert _held(found) == _held(_read(kind, str(Path(url).resolve()), str(tmp_path / "empty")))
    assert found.identity != first.identity


@pytest.mark.parametrize("kind", ["tars", "litdata"])
def test_a_copy_with_other_times_is_the_same_data(kind: str, tmp_path: Path) -> None:
    _write(kind, tmp_path / "set", 0)
    cache = str(tmp_path / "cache")
    own = _read(kind, str(tmp_path / "set"), cache)
    shutil.copytree(tmp_path / "set", tmp_path / "copy", copy_function=shutil.copyfile)
    copy = _read(kind, str(tmp_path / "copy"), cache)
    assert copy.identity == own.identity
    assert _held(copy) == _held(own)


def test_a_replaced_tar_of_a_bucket_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = str(tmp_path / "cache")
    with bucket() as door:
        for name, value in door.variables.items():
            monkeypatch.setenv(name, value)
        held = []
        for shift in (0, 1):
            _write("tars", tmp_path / "set", shift)
            door.upload(tmp_path / "set", "set")  # type: ignore[attr-defined]
            held.append(_held(_read("tars", f"s3://{BUCKET}/set", cache)))
        assert held[0] != held[1]
        assert held[1] == _held(_read("tars", f"s3://{BUCKET}/set", str(tmp_path / "empty")))
        assert held[1] == _held(_read("tars", f"s3://{BUCKET}/set", cache))


def test_a_set_that_is_replaced_while_a_run_begins_is_told(tmp_path: Path) -> None:
    """On a node whose first rank has made the index of what was there before."""
    _write("tars", tmp_path / "set", 0)
    source = StreamImages(
        f"{tmp_path}/set/{{0..1}}.tar", f"{tmp_path}/set/{{0..1}}.tar", list(TRAINED), SIDE,
        cache=str(tmp_path / "cache"),
    )  # fmt: skip
    with pytest.raises(UserError, match="has changed since the run began"):
        source.open(Path())


# -- the part of another set that validation takes ----------------------------------------------------


def _images(root: Path) -> Any:
    list(image_data(Drawn(TRAINED, TRAINED[:2])).write(root))
    return lambda *urls: image_data(StreamImages(*urls, size=SIDE, cache=None), resident=False)


def _boxes(root: Path) -> Any:
    list(box_data(DrawnBoxes(TRAINED, TRAINED[:2])).write(root, "stream"))
    return lambda *urls: box_data(StreamBoxes(*urls, cache=None))


def _masks(root: Path) -> Any:
    masks_in(root.with_name("files"), TRAINED[:2], "val")
    masks_in(root.with_name("files"), TRAINED, "train")
    list(MaskData(str(root.with_name("files")), SIDE, workers=0).write(root))
    return lambda *urls: MaskData(size=SIDE, workers=0, source=StreamMasks(*urls, cache=None))


def _tokens(root: Path) -> Any:
    root.with_name("text").write_text("".join(f"line {i} of it\n" for i in range(400)))
    list(TextData(TextFiles(str(root.with_name("text")))).write(root))
    return lambda *urls: TextData(StreamText(*urls, cache=None), valid_piece=64, valid_context=8)


def _tensors(batch: Any) -> list[torch.Tensor]:
    items = batch if isinstance(batch, tuple) else vars(batch).values()
    return [item for item in items if isinstance(item, torch.Tensor)]


@pytest.mark.parametrize("make", [_images, _boxes, _masks, _tokens])
def test_of_a_set_with_two_parts_validation_takes_that_for_validation(
    make: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read = make(tmp_path / "set")
    own, named = prepared(read("set")), prepared(read("set", "set"))
    assert named.describe() == own.describe()
    assert named.identity == own.identity
    assert (named.train_size, named.valid_size) == (own.train_size, own.valid_size)
    [one], [other] = ([*of.valid_batches([range(of.valid_size)])] for of in (own, named))
    assert all(map(torch.equal, _tensors(one), _tensors(other)))
    assert _tensors(one)


def test_its_classes_are_taken_by_their_names(tmp_path: Path) -> None:
    list(image_data(Drawn(TRAINED, TRAINED)).write(tmp_path / "own"))
    turned = ("cat", "ant", "bee")
    list(image_data(Drawn(turned, turned[:2])).write(tmp_path / "other"))
    urls = [str(tmp_path / name) for name in ("own", "other")]
    data = prepared(image_data(StreamImages(*urls, size=SIDE, cache=None), resident=False))
    assert [*map(sorted, (label for label, _ in told(data)))].count(["cat"]) == 3
    assert all(label == shown for label, shown in told(data))
    assert data.valid_size == 6
