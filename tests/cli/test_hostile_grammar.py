"""Files that hypothesis draws, by the grammar of what is read and by its breaking: each is read, or refused
by a UserError, quickly, and nothing is written outside of the folder."""

import contextlib
import hashlib
import io
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddptrain.config.limits import read_config
from ddptrain.data.detection.coco import CocoFiles
from ddptrain.data.detection.yolo import YoloFiles
from ddptrain.data.images.csv_labels import CsvLabels
from ddptrain.data.pictures import fitted
from ddptrain.data.text.tokens import open_tokens
from ddptrain.engine.saved_checkpoint import FORMAT, LoadedCheckpoint, read, sealed, unpack
from ddptrain.engine.saved_checkpoint import STATE as STATE_FILE
from ddptrain.errors import UserError
from ddptrain.tools.report.page import write_page
from ddptrain.tools.report.run_files import read_run
from ddptrain.tools.sweep.ledger import LEDGER, read_ledger

LONGEST_S = 10.0
"""Of this process's own: what neighbours take does not count."""
MOST_BYTES = 1 << 30

odd_numbers = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**30, -0.0, 1e308, 1e-320, float("nan"), float("inf")]),
)
odd_texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "",
            " ",
            "\0",
            "a" * 400,
            "../" * 40,
            "/etc/passwd",
            "\ud800",
            "\u202e",
            "null",
            "1e5",
            "é" * 200,
            "~",
            "${HOME}",
        ]
    ),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), odd_numbers, odd_texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(odd_texts, inner, max_size=4)),
    max_leaves=12,
)
raw = st.one_of(
    st.binary(max_size=200),
    st.sampled_from(
        [
            b"[" * 100_000,
            b'{"a":' * 50_000,
            b"- " * 20_000,
            b"9" * 10_000,
            b"\xff\xfe",
            b"a: &a [*a, *a]\n",
            b"\n" * 1000,
            b"!!python/name:os.system",
            b"{",
        ]
    ),
)


def filled(skeleton: Any) -> st.SearchStrategy[Any]:
    """The skeleton with some of its parts replaced, left out or doubled."""
    if isinstance(skeleton, dict):
        return st.fixed_dictionaries({}, optional={name: filled(part) for name, part in skeleton.items()})
    if isinstance(skeleton, list):
        return st.one_of(
            st.lists(st.one_of([filled(part) for part in skeleton] or [values]), max_size=4), values
        )
    return st.one_of(st.just(skeleton), st.just(skeleton), values)


def as_bytes(tree: Any) -> bytes:
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def file_of(skeleton: Any) -> st.SearchStrategy[bytes]:
    """JSON, which is YAML too: whole, broken off, with a byte changed, or something else."""
    whole = filled(skeleton).map(as_bytes)

    @st.composite
    def damaged(draw: st.DrawFn) -> bytes:
        data = bytearray(draw(whole))
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
        return bytes(data[: draw(st.integers(0, len(data)))])

    return st.one_of(whole, whole, damaged(), raw)


RUN = {
    "config.yaml": {
        "recipe": "cnn_digits", "seed": 0, "optim": {"lr": 0.1}, "train": {"epochs": 3, "steps": None},
    },
    "summary.json": {
        "outcome": "done", "step": 5, "steps": 5, "metrics": {"accuracy": 0.5},
        "best": {"accuracy": 0.5, "step": 5},
        "higher_is_better": True, "samples_per_s": 5.0, "seconds": 1.0, "peak_memory_mib": 3.0,
        "time": {"data": 0.1, "forward": 1.0},
        "devices": {"gpu0": {"mean": {"utilisation": 5.0}}}, "verdict": "fine",
    },
    "environment.json": {"ddptrain": "0.1.0", "libraries": {"torch": "2.15"}, "gpus": ["A"], "world_size": 2},
    "metrics.jsonl": {"step": 1, "epoch": 0.1, "samples": 3, "split": "train", "loss": 2.0, "AP/cat": 0.5},
    "command.txt": "python -m ddptrain",
}  # fmt: skip
COCO = {
    "images": [{"id": 1, "file_name": "a.png", "width": 8, "height": 8}],
    "annotations": [
        {"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 4, 4], "iscrowd": 0, "area": 16}
    ],
    "categories": [{"id": 1, "name": "cat"}],
}
YOLO = {"path": ".", "train": "images", "val": ["images"], "names": ["cat", "dog"], "nc": 2}
LEDGER_LINES: list[dict[str, Any]] = [
    {"event": "job", "job": 0, "key": "a", "words": ["seed=1"], "time": 1.0},
    {"event": "started", "job": 0, "on_cpu": True, "gpus": ["0"], "metric": "loss", "steps": 4, "time": 2.0},
    {"event": "evaluated", "job": 0, "value": 0.5, "step": 2, "higher_is_better": False, "time": 3.0},
    {"event": "ended", "job": 0, "status": "done", "code": 0, "why": "", "seconds": 4.0, "time": 5.0},
]
STATE = {"model": {"a": 1}, "optimizer": {}, "step": 3, "average": {}}


def run_folder(folder: Path, draw: Callable[[Any], bytes]) -> None:
    for name, skeleton in RUN.items():
        (folder / name).write_bytes(draw(skeleton))
    run = read_run(folder, "a")
    write_page([run], "t", [], folder / "report.html")


def config(folder: Path, draw: Callable[[Any], bytes]) -> None:
    (folder / "config.yaml").write_bytes(draw(RUN["config.yaml"]))
    read_config(folder / "config.yaml")


def picture(folder: Path, content: bytes = b"") -> None:
    from PIL import Image

    if content:
        (folder / "a.png").write_bytes(content)
    else:
        Image.new("RGB", (8, 8)).save(folder / "a.png")


def coco(folder: Path, draw: Callable[[Any], bytes]) -> None:
    picture(folder)
    (folder / "train.json").write_bytes(draw(COCO))
    valid = {**COCO, "images": [{"id": 1, "file_name": "b.png", "width": 8, "height": 8}]}
    (folder / "valid.json").write_bytes(as_bytes(valid))
    (folder / "b.png").write_bytes((folder / "a.png").read_bytes())
    CocoFiles(str(folder / "train.json"), str(folder / "valid.json")).open(folder)


def yolo(folder: Path, draw: Callable[[Any], bytes]) -> None:
    (folder / "images").mkdir(exist_ok=True)
    (folder / "labels").mkdir(exist_ok=True)
    picture(folder / "images")
    (folder / "labels/a.txt").write_bytes(draw("0 0.5 0.5 0.2 0.2").strip(b'"'))
    (folder / "data.yaml").write_bytes(draw(YOLO))
    YoloFiles(str(folder / "data.yaml")).open(folder)


def ledger(folder: Path, draw: Callable[[Any], bytes]) -> None:
    (folder / LEDGER).write_bytes(b"".join(draw(line) + b"\n" for line in LEDGER_LINES))
    read_ledger(folder, live=False)


def checkpoint(folder: Path, draw: Callable[[Any], bytes]) -> None:
    place = folder / "step-3"
    place.mkdir(exist_ok=True)
    payload = draw(STATE)
    with contextlib.suppress(ValueError, RecursionError):
        written = io.BytesIO()
        torch.save(json.loads(payload), written)
        payload = written.getvalue()
    entry = {"sha256": hashlib.sha256(payload).hexdigest(), "bytes": len(payload)}
    manifest = draw({"format": FORMAT, "step": 3, "files": {STATE_FILE: entry}, "recall": {}})
    with contextlib.suppress(ValueError, RecursionError, AttributeError, TypeError):
        manifest = sealed(json.loads(manifest))
    (place / "state.pt").write_bytes(payload)
    (place / "manifest.json").write_bytes(manifest)
    try:
        read(place)
    finally:
        unpack(LoadedCheckpoint(place, payload, {"files": {}}))


def tokens(folder: Path, draw: Callable[[Any], bytes]) -> None:
    for part in ("train", "valid"):
        (folder / part).write_bytes(b"\0\1")
    about = {"sizes": [2, 2], "alphabet": "ab", "documents": [1, 1], "sha256": "0"}
    (folder / "about.json").write_bytes(draw(about))
    open_tokens(folder)


def image(folder: Path, draw: Callable[[Any], bytes]) -> None:
    picture(folder)
    good = (folder / "a.png").read_bytes()
    cut = draw("x")
    picture(folder, good if cut == as_bytes("x") else good[: len(cut) * 3] + draw("y"))
    fitted(folder / "a.png", (8, 8, 3))


LONG = "é" * 200  # bytes: more than a file's name may have
HERE = {"path": ".", "names": ["a"]}
NAMED = {
    "coco": (
        "train.json",
        {"images": [{"id": 1, "file_name": LONG, "width": 8, "height": 8}], "annotations": []},
    ),
    "path": ("data.yaml", {**HERE, "path": LONG, "train": "images"}),
    "part": ("data.yaml", {**HERE, "train": LONG}),
    "up": ("data.yaml", {**HERE, "train": f"../{LONG}"}),
    "list": ("data.yaml", {**HERE, "train": "list.txt"}),
    "csv": ("labels.csv", {}),
}


@pytest.mark.parametrize("case", NAMED)
def test_a_name_too_long_for_a_file_is_none(case: str, tmp_path: Path) -> None:
    name, content = NAMED[case]
    (tmp_path / name).write_text(json.dumps(content) if content else f"file,label\n{LONG}.png,a\n")
    (tmp_path / "list.txt").write_text(f"{LONG}.png\n")
    file = str(tmp_path / name)
    source = CsvLabels() if case == "csv" else CocoFiles(file) if case == "coco" else YoloFiles(file)
    with pytest.raises(UserError):
        source.open(tmp_path)


READERS = [run_folder, config, coco, yolo, ledger, checkpoint, tokens, image]


def attempt(
    reader: Callable[[Path, Callable[[Any], bytes]], None], folder: Path, data: st.DataObject
) -> None:
    before, began = {path for path in folder.parent.rglob("*") if path != folder}, time.process_time()
    outside = {path for path in before if not path.is_relative_to(folder)}
    said = "read"
    try:
        reader(folder, lambda skeleton: data.draw(file_of(skeleton)))
    except UserError as error:
        said = str(error)
    assert 0 < len(said) < 20_000
    assert time.process_time() - began < LONGEST_S
    assert {path for path in folder.parent.rglob("*") if not path.is_relative_to(folder)} == outside


def run_examples(reader: Callable[[Path, Callable[[Any], bytes]], None], folder: Path, count: int) -> None:
    inside = folder / "inside"
    inside.mkdir()

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def one(data: st.DataObject) -> None:
        attempt(reader, inside, data)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    one()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < MOST_BYTES


@pytest.mark.parametrize("reader", READERS)
def test_undamaged_files_are_read(reader: Any, tmp_path: Path) -> None:
    """So that what is drawn gets beyond the first check."""
    reader(tmp_path, as_bytes)


@pytest.mark.parametrize("reader", READERS)
def test_drawn_files_are_read_or_refused(reader: Any, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run_examples(reader, tmp_path, 25)


@pytest.mark.long
@pytest.mark.parametrize("reader", READERS)
def test_many_drawn_files_are_read_or_refused(reader: Any, tmp_path: Path) -> None:
    run_examples(reader, tmp_path, 1200)
