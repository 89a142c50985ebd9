"""A stranger's archive, with the SHA-256 that a stranger's config gives it: read only as far as it can be
right, never unpacked to the disk."""

import gzip
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hostile import Place
from served import BATCHES, add, small_archive

from ddptrain.data.images.cifar10 import ARCHIVE, Cifar10
from ddptrain.errors import UserError

RECORD = 3073


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path, monkeypatch, capsys)


def a_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("../../canary", b"x")
    return buffer.getvalue()


def packed(*members: tuple[str, bytes] | tarfile.TarInfo, right: bool = True) -> bytes:
    """A gzipped tar of these members, before those of a right archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=tarfile.GNU_FORMAT) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                add(tar, *member)
        for name in BATCHES if right else []:
            add(tar, f"cifar-10-batches-bin/{name}", bytes(RECORD))
    return buffer.getvalue()


def special(kind: bytes, name: str = "x", target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def raw(*members: tarfile.TarInfo) -> bytes:
    """Headers alone, which may promise any size."""
    return gzip.compress(b"".join(member.tobuf(tarfile.GNU_FORMAT) for member in members))


def promises(size: int, kind: bytes = tarfile.REGTYPE, name: str = "test_batch.bin") -> tarfile.TarInfo:
    member = special(kind, name)
    member.size = size
    return member


ARCHIVES: dict[str, tuple[Callable[[], bytes], str]] = {
    "a symbolic link": (
        lambda: packed(special(tarfile.SYMTYPE, "test_batch.bin", "/etc/passwd")),
        "is a link",
    ),
    "a hard link": (lambda: packed(special(tarfile.LNKTYPE, "x", "../../canary")), "is a link"),
    "a device": (lambda: packed(special(tarfile.BLKTYPE)), "is a link, a device"),
    "a character device": (lambda: packed(special(tarfile.CHRTYPE, "test_batch.bin")), "is a link, a device"),
    "a pipe": (lambda: packed(special(tarfile.FIFOTYPE, "test_batch.bin")), "is a link, a device"),
    "a folder in a batch's place": (lambda: packed(special(tarfile.DIRTYPE, "test_batch.bin")), "0 bytes"),
    "a batch twice": (lambda: packed(("../test_batch.bin", bytes(RECORD))), "is there twice"),
    "half a record": (lambda: packed(("test_batch.bin", bytes(100))), "has 100 bytes"),
    "too many records": (lambda: packed(("test_batch.bin", bytes(RECORD * 10_001))), "has 30,733,073 bytes"),
    "an empty batch": (lambda: packed(("test_batch.bin", b"")), "has 0 bytes"),
    "an eleventh class": (lambda: packed(("test_batch.bin", b"\x0a" + bytes(3072))), "has label 10"),
    "no batches": (lambda: packed(("x", b""), right=False), "it has no data_batch_1.bin"),
    "many members": (lambda: packed(*((str(i), b"") for i in range(1000))), "more than 32 members"),
    "a bomb": (lambda: packed(("x", bytes(2**29)), right=False), "unpacks to more than 268,435,456 bytes"),
    "a bomb without a tar": (lambda: gzip.compress(bytes(2**29)), "is no archive"),
    "8 GB promised": (lambda: raw(promises(8 * 2**30)), "has 8,589,934,592 bytes"),
    "8 EB promised": (lambda: raw(promises(2**62)), "has 4,611,686,018,427,387,904 bytes"),
    "less than nothing": (lambda: raw(promises(-RECORD)), "is no archive"),
    "a name of 8 GB": (lambda: raw(promises(8 * 2**30, tarfile.GNUTYPE_LONGNAME)), "is no archive"),
    "a header of 8 GB": (lambda: raw(promises(8 * 2**30, tarfile.XHDTYPE)), "is no archive"),
    "names of names": (lambda: raw(*[promises(0, tarfile.GNUTYPE_LONGNAME)] * 5000), "is no archive"),
    "a sparse file": (lambda: raw(promises(RECORD, tarfile.GNUTYPE_SPARSE)), "is no archive|is a link"),
    "half an archive": (lambda: small_archive(100_000)[:60_000], "is no archive"),
    "text": (lambda: b"hello", "is no archive"),
    "nothing": (lambda: b"", "is no archive|it has no"),
    "a zip": (a_zip, "is no archive"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_hostile_archive_with_the_right_hash_is_refused(place: Place, name: str) -> None:
    make, said = ARCHIVES[name]
    content = make()
    (place.theirs / ARCHIVE).write_bytes(content)
    source = Cifar10("http://127.0.0.1:9/", hashlib.sha256(content).hexdigest())
    with place.untouched():
        source.fetch(place.theirs)
        with pytest.raises(UserError, match=said) as refused:
            source.open(place.theirs)
    assert str(refused.value).startswith(str(place.theirs / ARCHIVE))


def test_members_that_would_lead_outside_are_read_over_and_not_unpacked(place: Place) -> None:
    names = ["../../canary", str(place.canary), "cifar-10-batches-bin/../../canary"]
    content = packed(*((name, b"x") for name in names))
    (place.theirs / ARCHIVE).write_bytes(content)
    with place.untouched():
        opened = Cifar10("", hashlib.sha256(content).hexdigest()).open(place.theirs)
    assert len(opened.train) == 5


def test_the_command_line_refuses_a_hostile_archive(place: Place) -> None:
    make, said = ARCHIVES["a bomb"]
    content = make()
    (place.theirs / ARCHIVE).write_bytes(content)
    source = {
        "_target_": "ddptrain.data.images.cifar10.Cifar10",
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    data = {"_target_": "ddptrain.data.images.data.ImageData", "source": source, "root": "THEIRS"}
    run = place.run_of({"data": {**data, "augment": {"_target_": "ddptrain.data.images.augment.Augment"}}})
    state = io.BytesIO()
    torch.save({"model": {}, "optimizer": {}, "step": 1}, state)
    place.checkpoint_of(run, state.getvalue())
    message = place.refused(["evaluate", f"run={run}"])
    assert message.startswith(str(place.theirs / ARCHIVE))
    assert said in message
