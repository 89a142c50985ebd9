"""Damage to a checkpoint is noticed, whatever it is, and the one before is used (design promise 5)."""

import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.saved_checkpoint import FORMAT, MANIFEST, STATE, DamagedError, read, sealed, unpack
from ddptrain.errors import UserError

FLIPS, CUTS, PAGES = 200, 50, 50
PAGE = 4096
FACTS: dict[str, Any] = {
    "epoch": 0.30000000000000004,  # as JSON reads it, the same number as ...05
    "metrics": {"loss": 1e-05, "nothing": float("nan")},  # 1E-05 is the same number, one bit away
    "outputs": ["é", '"', "\\", "\n"],
    "data": "",
}


@pytest.fixture
def two(tmp_path: Path) -> Checkpointer:
    """The checkpoints of two steps, of random weights: 200 pages."""
    torch.manual_seed(0)
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step in (1, 2):
        state = {"model": {"w": torch.randn(200 * PAGE // 4)}, "optimizer": {}, "step": step}
        checkpointer.save(state, {"step": step, **FACTS})
    return checkpointer


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """The warnings that are given."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    keep, logger = Keep(logging.WARNING), logging.getLogger("ddptrain")
    logger.addHandler(keep)
    yield found
    logger.removeHandler(keep)


def falls_back(checkpointer: Checkpointer, warnings: list[str]) -> bool:
    """Whether the newest is refused, with one warning, and the one before it is given."""
    warnings.clear()
    newest = checkpointer.newest()
    assert newest is not None
    return newest.path.name == "step-1" and len(warnings) == 1 and "step-2" in warnings[0]


def with_bit(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_what_is_not_damaged_is_used(two: Checkpointer, warnings: list[str]) -> None:
    newest = two.newest()
    assert newest is not None
    assert newest.path.name == "step-2"
    assert not warnings


@pytest.mark.long
def test_every_bit_of_a_manifest_counts(two: Checkpointer, tmp_path: Path) -> None:
    """Also those that change a number's spelling and not its value."""
    file = tmp_path / "step-2" / MANIFEST
    content = file.read_bytes()
    for bit in range(8 * len(content)):
        file.write_bytes(with_bit(content, bit))
        with pytest.raises(DamagedError, match=r"manifest\.json"):
            read(tmp_path / "step-2")


@pytest.mark.parametrize("name", [STATE, MANIFEST])
def test_a_flipped_bit_is_noticed(two: Checkpointer, warnings: list[str], tmp_path: Path, name: str) -> None:
    file = tmp_path / "step-2" / name
    content, draw = file.read_bytes(), random.Random(1)
    noticed = 0
    for _ in range(FLIPS):
        file.write_bytes(with_bit(content, draw.randrange(8 * len(content))))
        noticed += falls_back(two, warnings)
    assert noticed == FLIPS


@pytest.mark.parametrize("name", [STATE, MANIFEST])
def test_a_cut_is_noticed(two: Checkpointer, warnings: list[str], tmp_path: Path, name: str) -> None:
    file = tmp_path / "step-2" / name
    content, draw = file.read_bytes(), random.Random(1)
    ends = [0, len(content) - 1, *(draw.randrange(len(content)) for _ in range(CUTS - 2))]
    noticed = 0
    for end in ends:
        file.write_bytes(content[:end])
        noticed += falls_back(two, warnings)
    assert noticed == CUTS
    file.write_bytes(content + b"\0")
    assert falls_back(two, warnings), "nor may anything be added"


def test_a_zeroed_page_is_noticed(two: Checkpointer, warnings: list[str], tmp_path: Path) -> None:
    file = tmp_path / "step-2" / STATE
    content, draw = file.read_bytes(), random.Random(1)
    noticed = 0
    for page in draw.sample(range(len(content) // PAGE), PAGES):
        changed = bytearray(content)
        changed[page * PAGE : (page + 1) * PAGE] = bytes(PAGE)
        file.write_bytes(changed)
        noticed += falls_back(two, warnings)
    assert noticed == PAGES
    file.write_bytes(content)
    manifest = tmp_path / "step-2" / MANIFEST
    manifest.write_bytes(bytes(manifest.stat().st_size))
    assert falls_back(two, warnings)


def swap(one: Path, other: Path) -> None:
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


@pytest.mark.parametrize("names", [[STATE], [MANIFEST], [STATE, MANIFEST], [""]])
def test_files_that_have_changed_places_are_noticed(
    two: Checkpointer, tmp_path: Path, names: list[str]
) -> None:
    """Each whole in itself: the two states have the same size, both files together fit each other."""
    for name in names:
        swap(tmp_path / "step-1" / name, tmp_path / "step-2" / name)
    for path in two.steps():
        with pytest.raises(DamagedError, match=path.name):
            read(path)
    with pytest.raises(UserError, match="none of its 2 checkpoints can be used"):
        two.newest()


@pytest.mark.parametrize("name", [STATE, MANIFEST])
def test_a_missing_file_is_noticed(two: Checkpointer, warnings: list[str], tmp_path: Path, name: str) -> None:
    (tmp_path / "step-2" / name).unlink()
    assert falls_back(two, warnings)
    assert f"{name} is missing" in warnings[0]


def files_of(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a manifest says of its files, and seal it again."""
    content = json.loads((path / MANIFEST).read_bytes())
    del content["sha256"]
    change(content["files"])
    (path / MANIFEST).write_bytes(sealed(content))


@pytest.mark.parametrize(
    "change",
    [
        lambda files: files.pop(STATE),
        lambda files: files[STATE].pop("sha256"),
        lambda files: files[STATE].pop("bytes"),
        lambda files: files[STATE].update(bytes="1"),
        lambda files: files[STATE].update(bytes=1),
        lambda files: files[STATE].update(more=1),
        lambda files: files.update(more=1),
        lambda files: files.update({STATE: None}),
    ],
)
def test_a_sealed_manifest_must_still_fit_its_file(
    two: Checkpointer, warnings: list[str], tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    files_of(tmp_path / "step-2", change)
    assert falls_back(two, warnings)


def test_a_state_of_another_step_is_refused(two: Checkpointer, tmp_path: Path) -> None:
    """Sealed as if it belonged there: only the state itself tells."""
    shutil.copy(tmp_path / "step-1" / STATE, tmp_path / "step-2" / STATE)
    first = read(tmp_path / "step-1").manifest
    (tmp_path / "step-2" / MANIFEST).write_bytes(sealed({**first, "step": 2}))
    saved = read(tmp_path / "step-2")
    with pytest.raises(DamagedError, match=r"step-2: its state\.pt is of step 1"):
        unpack(saved)


def test_another_format_is_no_damage(two: Checkpointer, tmp_path: Path) -> None:
    """Nothing is passed over for the one before: the run would lose steps to a wrong version of ddptrain."""
    content = {**read(tmp_path / "step-2").manifest, "format": FORMAT + 1}
    (tmp_path / "step-2" / MANIFEST).write_bytes(sealed(content))
    with pytest.raises(UserError, match=f"has format {FORMAT + 1}, and this ddptrain reads {FORMAT}"):
        two.newest()


@pytest.mark.parametrize("written", [b"", b"[]", b"3", b"{}", b"[" * 100_000, b'{"format": 3}', b"\xff\xfe"])
def test_what_is_no_manifest_is_refused(
    two: Checkpointer, warnings: list[str], tmp_path: Path, written: bytes
) -> None:
    (tmp_path / "step-2" / MANIFEST).write_bytes(written)
    assert falls_back(two, warnings)
