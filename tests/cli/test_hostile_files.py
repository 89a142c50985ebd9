"""A stranger's checkpoints and labelled pictures: nothing is executed, nothing is written outside the folder
given. Archives: tests/cli/test_hostile_archives.py."""

import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hostile import Payload, Place
from PIL import Image
from served import add
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ddptrain.engine.saved_checkpoint import LoadedCheckpoint, unpack
from ddptrain.engine.shards import with_shards
from ddptrain.errors import UserError
from ddptrain.recipes.detection.transformers_detector import transformers_detector
from ddptrain.verbs.main import main


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path, monkeypatch, capsys)


# -- checkpoints -----------------------------------------------------------------------------------


class Calls:
    """Unpickling it calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._reduced


def state(of: Any) -> bytes:
    return pickle.dumps({"model": of, "optimizer": {}, "step": 1}, 2)


def zipped(pickled: bytes, compression: int = zipfile.ZIP_STORED, **records: bytes) -> bytes:
    """As torch.save lays out a file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
        for name, content in records.items():
            archive.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def saved(of: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save({"model": {"w": of}, "optimizer": {}, "step": 1}, buffer)
    return buffer.getvalue()


def tampered(of: torch.Tensor, change: Callable[[dict[str, bytes]], None], compression: int = 0) -> bytes:
    """What torch.save writes, with its records changed."""
    with zipfile.ZipFile(io.BytesIO(saved(of))) as archive:
        records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    change(records)
    return zipped(records.pop("data.pkl"), compression, **records)


def declares(count: bytes) -> Callable[[dict[str, bytes]], None]:
    """Give the tensor of 1,000 numbers another count, as pickle spells it."""

    def change(records: dict[str, bytes]) -> None:
        records["data.pkl"] = records["data.pkl"].replace(b"M\xe8\x03", count)

    return change


def legacy_tar(canary: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("storages", "tensors", "pickle"):
            add(tar, name, pickle.dumps(Payload(canary), 2))
    return buffer.getvalue()


def payloads(canary: str) -> dict[str, bytes]:
    touch = f"touch {canary}"
    calls = {
        "os.system": Calls(os.system, touch),
        "eval": Calls(eval, f"open({canary!r}, 'w')"),
        "exec": Calls(exec, f"open({canary!r}, 'w')"),
        "open": Payload(canary),
        "getattr": Calls(getattr, "x", "upper"),
        "torch.load": Calls(torch.load, canary),
        "torch.save": Calls(torch.save, {}, canary),
        "in an OrderedDict": OrderedDict(a=Calls(os.system, touch)),
        "in a list": [Calls(os.system, touch)],
        "a path": Path(canary),
        "a numpy number": np.float64(1),
        "a numpy array": np.zeros(3),
        "a numpy array of objects": np.array([Payload(canary)], dtype=object),
    }
    numbers = torch.arange(1000.0)
    return {
        **{f"{name}, bare": state(of) for name, of in calls.items()},
        **{f"{name}, zipped": zipped(state(of)) for name, of in calls.items()},
        "legacy": b"".join(
            pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {}, Payload(canary))
        ),
        "legacy tar": legacy_tar(canary),
        "TorchScript": zipped(state({}), **{"constants.pkl": state(Payload(canary))}),
        "a tensor of 2**40 numbers": tampered(numbers, declares(b"\x8a\x06" + (2**40).to_bytes(6, "little"))),
        "a tensor of -5 numbers": tampered(numbers, declares(b"J" + struct.pack("<i", -5))),
        "a tensor without numbers": tampered(numbers, lambda records: records.pop("data/0")),
        "a text of 2**60 bytes": zipped(b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"N."),
        "a number of 2**31 bytes": zipped(b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"x."),
        "100,000 lists in each other": zipped(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."),
        "a list": zipped(pickle.dumps([1, 2], 2)),
        "nothing": b"",
        "text": b"hello",
        "weights alone": zipped(pickle.dumps({"w": 1}, 2)),
    }


NAMES = list(payloads(""))


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_state_is_refused_and_not_run(place: Place, name: str) -> None:
    payload = payloads(str(place.canary))[name]
    with place.untouched(), pytest.raises(UserError, match=r"^theirs: state\.pt is not a state of ddptrain"):
        unpack(LoadedCheckpoint(Path("theirs"), payload, {"files": {}}))


def test_a_bomb_in_a_state_is_refused_before_it_is_unpacked() -> None:
    bomb = tampered(torch.zeros(2**26), lambda records: None, zipfile.ZIP_DEFLATED)
    assert len(bomb) < 2**20
    with pytest.raises(UserError, match="is not a state of ddptrain"):
        unpack(LoadedCheckpoint(Path("theirs"), bomb, {"files": {}}))


def test_a_hostile_run_folder_is_refused_by_every_verb(place: Place) -> None:
    """The config is right and so is the manifest, but the state is not."""
    run = place.run_of({})
    place.checkpoint_of(run, zipped(state(Payload(str(place.canary)))))
    for verb in ("evaluate", "export"):
        words = [verb, f"run={run}", *(["format=pt2", f"out={run}/x.pt2"] if verb == "export" else [])]
        assert "state.pt is not a state of ddptrain" in place.refused(words)


@pytest.mark.parametrize("kind", ["bytes", "elsewhere", "link"])
def test_a_hostile_list_of_shards_is_refused(place: Place, kind: str) -> None:
    """torch would unpickle an entry of bytes with whatever it asks for, and follow any path."""
    folder = place.work / "shards"
    folder.mkdir()
    payload = io.BytesIO()
    torch.save(Payload(str(place.canary)), payload)
    (folder / "__0_0.distcp").write_bytes(payload.getvalue())
    about: Any = BytesStorageMetadata()
    if kind != "bytes":
        properties = TensorProperties(dtype=torch.float32)
        about = TensorStorageMetadata(properties, torch.Size([1]), [])
    where = {"bytes": "__0_0.distcp", "elsewhere": "../x.distcp", "link": "/etc/passwd"}[kind]
    stored = {MetadataIndex("0"): _StorageInfo(where, 0, len(payload.getvalue()))}
    metadata = Metadata(state_dict_metadata={"0": about}, storage_data=stored)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with place.untouched(), pytest.raises(pickle.UnpicklingError):
        with_shards({"weight": "\0shard 0"}, folder, lambda size, dtype: torch.empty(size, dtype=dtype))


@pytest.mark.parametrize("argument", ["trust_remote_code", "cache_dir", "revision"])
def test_a_model_of_transformers_runs_no_code_of_its_folder(argument: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UserError, match=f"^model.{argument}: is no argument of a model's config"):
        transformers_detector("theirs", 2, 64, **{argument: True})


# -- labelled pictures -----------------------------------------------------------------------------


def test_pictures_named_outside_are_written_inside(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """A COCO JSON may name pictures anywhere; their copies get names of their own."""
    names = ["../outside.png", str(place.root / "absolute.png"), "a/../../up.png"]
    names += [f"{i}.png" for i in range(17)]
    (place.theirs / "images" / "a").mkdir(parents=True)
    for name in names:
        Image.new("RGB", (32, 32)).save(place.theirs / "images" / name)
    images = [{"id": i, "file_name": name, "width": 32, "height": 32} for i, name in enumerate(names)]
    boxes = [
        {"id": i, "image_id": i, "category_id": 1, "bbox": [1, 1, 9, 9], "area": 81}
        for i in range(len(names))
    ]
    file = place.theirs / "images" / "instances.json"
    content = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "../../x"}]}
    file.write_text(json.dumps(content))
    out = place.work / "out"
    with place.untouched():
        for layout in ("coco", "yolo"):
            words = [
                "write",
                "recipe=yolo_custom",
                f"data.source.path={file}",
                f"out={out}",
                f"layout={layout}",
            ]
            assert main(words) == 0, capsys.readouterr()
            assert all(path.is_relative_to(out) for path in place.work.rglob("*"))
            assert len(list(out.rglob("*.png"))) == len(names)
            for path in sorted(out.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            out.rmdir()


@pytest.mark.parametrize(
    "text",
    [
        "train: !!python/object/apply:os.system ['touch CANARY']",
        yaml.safe_dump({"train": 5}),
        "- a",
        "train: images\nnames: !!python/name:os.system",
    ],
)
def test_a_hostile_data_yaml_is_refused(place: Place, text: str) -> None:
    (place.theirs / "data.yaml").write_text(place.filled(text))
    words = ["write", "recipe=yolo_custom", "data.source.path=THEIRS/data.yaml", "out=out"]
    assert "data.yaml" in place.refused(words)
