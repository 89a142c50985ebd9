"""Packed pictures: the same batches as by decoding, made once, checked, mended where damaged."""

import json
import logging
import os
import resource
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.images.augment import Augment
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.folder import ImageFolder
from ddptrain.distributed.comm import once_a_node
from ddptrain.errors import UserError
from ddptrain.testing import run_ranks

COUNT = 15
"""Pictures of a class."""
NOBODY = 65534


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """JPEGs of noise in several sizes, in two classes, of which every tenth is held out."""
    root, generator = tmp_path / "pictures", torch.Generator().manual_seed(0)
    for name in ("cats", "dogs"):
        (root / name).mkdir(parents=True)
        for i in range(COUNT):
            pixels = torch.randint(0, 256, (20 + i, 30, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(root / name / f"{i:02}.jpg")
    return root


def batches(root: Path, cache: Path | None, resident: bool, workers: int = 0, size: int = 16) -> list[Tensor]:
    source = ImageFolder(size, None if cache is None else str(cache))
    data = ImageData(source, Augment(3, "alternate", 5), str(root), workers, resident)
    data.prepare(World(), seed=5)
    trained = data.train_batches(Sampler(data.train_size, 8, seed=5), range(6))
    return [tensor for batch in (*trained, *data.valid_batches([range(2)])) for tensor in batch]


def packed(root: Path, cache: Path, size: int = 16) -> Path:
    """Pack, and the folder that came of it."""
    before = set(cache.glob("[!.]*"))
    ImageFolder(size, str(cache)).fetch(root)
    (found,) = set(cache.glob("[!.]*")) - before or before
    return found


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("resident", "workers"), [(True, 0), (False, 0), (False, 2)])
def test_batches_are_bit_for_bit_those_of_decoding(
    pictures: Path, tmp_path: Path, resident: bool, workers: int
) -> None:
    expected = batches(pictures, None, resident=False)
    for _ in range(2):
        assert_equal(batches(pictures, tmp_path / "cache", resident, workers), expected)
    assert len(list((tmp_path / "cache").glob("[!.]*"))) == 1


def test_more_pictures_than_are_written_at_a_time(tmp_path: Path) -> None:
    for name, colour in (("a", (10, 0, 0)), ("b", (0, 0, 20))):
        (tmp_path / "in" / name).mkdir(parents=True)
        for i in range(100):
            Image.new("RGB", (12, 10), (colour[0], i, colour[2])).save(tmp_path / "in" / name / f"{i:03}.png")
    source = ImageFolder(224, str(tmp_path / "cache"))
    source.fetch(tmp_path / "in")
    found, expected = source.open(tmp_path / "in"), ImageFolder(224).open(tmp_path / "in")
    ids = torch.tensor([179, 0, 110, 111, 112, 3])
    assert torch.equal(found.train.images(ids), expected.train.images(ids))
    assert torch.equal(found.train.labels, expected.train.labels)


def test_it_is_made_once_and_then_only_read(pictures: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    def rank(world: World) -> int:
        source = ImageFolder(16, str(cache))
        once_a_node(world, lambda: source.fetch(pictures))
        return int(source.open(pictures).train.images(torch.arange(26)).sum())

    assert len(set(run_ranks(rank, 3))) == 1
    made = packed(pictures, cache).stat()
    (lock,) = cache.glob(".*")
    lock.unlink()
    again = packed(pictures, cache).stat()
    assert (again.st_ino, again.st_mtime_ns) == (made.st_ino, made.st_mtime_ns)
    assert not list(cache.glob(".*"))  # nothing is written, so the folder may be one to read only


def test_who_comes_second_waits_for_the_first(pictures: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    def rank(world: World) -> int:
        return packed(pictures, cache).stat().st_ino  # as jobs or nodes that know nothing of each other

    assert len(set(run_ranks(rank, 3))) == 1
    assert len(list(cache.iterdir())) == 2


def test_another_picture_or_size_makes_another_folder(pictures: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    one = packed(pictures, cache)
    two = packed(pictures, cache, size=20)
    Image.new("RGB", (50, 50)).save(pictures / "cats" / "00.jpg")
    three = packed(pictures, cache)
    os.utime(pictures / "dogs" / "03.jpg", (1, 1))
    four = packed(pictures, cache)
    assert len({one, two, three, four}) == 4
    ImageFolder(16, str(cache)).fetch(pictures.rename(tmp_path / "moved"))
    assert len(list(cache.glob("[!.]*"))) == 5  # the same names, sizes and times may be of others there


@pytest.mark.parametrize("link", ["", "train", "train/dogs", "elsewhere"])
def test_another_set_of_equal_names_sizes_and_times_is_no_other_sets_pixels(
    link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a link that comes to lead to it, or by the same words in another current folder."""
    monkeypatch.chdir(tmp_path)
    for root, colour in (("one", 60), ("two", 160)):
        for part in ("train/cats", "train/dogs", "val/cats", "val/dogs"):
            (tmp_path / root / "set" / part).mkdir(parents=True)
            file = tmp_path / root / "set" / part / "0.bmp"
            Image.new("RGB", (20, 20), (colour, 0, 0)).save(file)
            os.utime(file, (1, 1))

    def read() -> int:
        source = ImageFolder(16, str(tmp_path / "cache"))
        source.fetch(Path("set"))
        return int(source.open(Path("set")).train.images(torch.tensor([1]))[0, 0, 0, 0])

    if link == "elsewhere":
        os.chdir(tmp_path / "one")
        assert read() == 60
        os.chdir(tmp_path / "two")
    else:
        shutil.copytree("one/set", "set")
        if link:
            shutil.rmtree(tmp_path / "set" / link)
        else:
            shutil.rmtree(tmp_path / "set")
        (tmp_path / "set" / link).symlink_to(tmp_path / "one/set" / link)
        assert read() == 60
        (tmp_path / "set" / link).unlink()
        (tmp_path / "set" / link).symlink_to(tmp_path / "two/set" / link)
    assert read() == 160


@pytest.mark.parametrize("damage", ["bit", "cut", "about", "gone"])
def test_damage_is_noticed_and_mended_with_one_warning(
    pictures: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache, expected = tmp_path / "cache", batches(pictures, None, resident=False)
    folder = packed(pictures, cache)
    pixels = bytearray((folder / "train").read_bytes())
    if damage == "bit":
        pixels[5000] ^= 4
        (folder / "train").write_bytes(pixels)
    elif damage == "cut":
        (folder / "train").write_bytes(pixels[:-1])
    elif damage == "about":
        (folder / "about.json").write_text("{")
    else:
        (folder / "valid").unlink()
    with caplog.at_level(logging.INFO, "ddptrain"):
        assert_equal(batches(pictures, cache, resident=False), expected)
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    why = {
        "bit": "pixels in train differ from what was written",
        "cut": "train has 21,503 bytes instead of 21,504",
        "about": "about.json can't be read",
        "gone": "valid can't be read: No such file or directory",
    }
    assert warnings[0] == f"packed     {folder} is damaged ({why[damage]}); it is made anew"
    caplog.clear()
    packed(pictures, cache)
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


def test_what_a_killed_process_left_is_no_hindrance(pictures: Path, tmp_path: Path) -> None:
    folder = packed(pictures, tmp_path / "cache")
    folder.rename(folder.with_name(f".{folder.name}.part"))
    (folder.with_name(f".{folder.name}.part") / "train").write_bytes(b"half")
    assert packed(pictures, tmp_path / "cache") == folder
    assert not folder.with_name(f".{folder.name}.part").exists()


@pytest.mark.parametrize("split", ["00.jpg", "09.jpg"])
def test_a_broken_picture_is_an_error_whose_way_out_is_one(
    pictures: Path, tmp_path: Path, split: str
) -> None:
    cache = tmp_path / "cache"
    (pictures / "cats" / split).write_bytes(b"\xff\xd8 no picture")
    with pytest.raises(UserError) as without:
        batches(pictures, None, resident=True)
    with pytest.raises(UserError) as packing:
        batches(pictures, cache, resident=True)
    assert str(without.value).endswith(" data.on_error=skip.")
    way_out = str(without.value).replace("=skip", "=skip data.source.cache=null")  # which refuses skip
    assert str(packing.value) == way_out
    assert not list(cache.glob("[!.]*"))
    assert not list(cache.glob("*.part"))


def test_a_disk_that_refuses_is_one_clear_error(pictures: Path, tmp_path: Path) -> None:
    def rank(world: World) -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        with pytest.raises(UserError) as refused:
            packed(pictures, tmp_path / "cache")
        return str(refused.value)

    (found,) = run_ranks(rank, 1)
    assert found == (
        f"data.source.cache={tmp_path / 'cache'}: 0.0 MiB of packed pictures can't be written there (File too"
        " large). Name another folder, or do without: data.source.cache=null."
    )
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=r"file/cache: .*\(Not a directory\)\. Name another folder, or .*=null"
    ):
        packed(pictures, tmp_path / "file" / "cache")


def test_a_cache_among_the_classes_is_refused(pictures: Path) -> None:
    with pytest.raises(UserError, match=r"data\.source\.cache=.*lies in data\.root"):
        ImageFolder(16, str(pictures / "cache")).fetch(pictures)


FULL = """
import subprocess, sys
from pathlib import Path
from ddptrain.data.images.folder import ImageFolder
from ddptrain.errors import UserError

pictures, disk = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], check=True)
try:
    ImageFolder(224, disk + "/cache").fetch(Path(pictures))
except UserError as error:
    print(error)
"""


def test_room_is_asked_for_where_the_disk_is_full(pictures: Path, tmp_path: Path) -> None:
    alone = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    (disk := tmp_path / "disk").mkdir()
    mount = f"mount -t tmpfs -o size=1m none {disk}"
    if not shutil.which("unshare") or subprocess.run([*alone, "sh", "-c", mount]).returncode:
        pytest.skip("NOT SEEN: a full disk; this user may not mount a file system")
    command = [*alone, sys.executable, "-c", FULL, str(pictures), str(disk)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.stdout == (
        f"data.source.cache={disk}/cache: 4.3 MiB of packed pictures can't be written there (No space left on"
        " device). Make room, name another folder, or do without: data.source.cache=null.\n"
    ), ended.stderr


@pytest.mark.parametrize("state", ["damaged", "of other pictures"])
def test_what_lies_in_a_folder_to_read_only_is_told(pictures: Path, tmp_path: Path, state: str) -> None:
    folder = packed(pictures, tmp_path / "cache")
    if state == "damaged":
        (folder / "train").write_bytes(b"")
    else:
        os.utime(pictures / "dogs" / "03.jpg", (1, 1))
    for lock in folder.parent.glob(".*"):
        lock.unlink()
    folder.parent.chmod(0o555)
    tmp_path.chmod(0o755)  # that nobody gets as far as the folders

    def as_nobody(world: World) -> str:
        os.chdir(tmp_path)
        if os.geteuid() == 0:  # who may write anywhere
            os.seteuid(NOBODY)
        with pytest.raises(UserError) as refused:
            ImageFolder(16, "cache").fetch(Path("pictures"))
        return str(refused.value)

    [found] = run_ranks(as_nobody, 1)
    told = {
        "damaged": f"{folder.name} there is damaged: train has 0 bytes instead of 21,504.",
        "of other pictures": f"What is packed there ({folder.name}) was made of files in other folders, of"
        " other names, sizes or times of change, or by another version of Pillow; about.json in it says when"
        " and of what.",
    }
    assert found == (
        "data.source.cache=cache: 0.0 MiB of packed pictures can't be written there (Permission denied)."
        f" {told[state]} Name another folder, or do without: data.source.cache=null."
    )


def test_people_can_tell_packs_apart(pictures: Path, tmp_path: Path) -> None:
    about = json.loads((packed(pictures, tmp_path / "cache") / "about.json").read_text())
    assert (about["root"], about["size"]) == (str(pictures), 16)
    assert about["pictures"] == {"train": 28, "valid": 2}
    assert datetime.fromisoformat(about["made"]).tzinfo is not None


@pytest.mark.parametrize("cache", ["", " "])
def test_a_cache_without_a_name_is_refused(cache: str) -> None:
    with pytest.raises(
        UserError, match=r"data\.source\.cache=: must name a folder.*data\.source\.cache=null"
    ):
        ImageFolder(16, cache)
