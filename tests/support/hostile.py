"""What a stranger may send, and how to see that it did nothing: a canary that it would make."""

import hashlib
import os
import pickle
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddptrain.config import targets
from ddptrain.engine.saved_checkpoint import FORMAT, MANIFEST, STATE, sealed
from ddptrain.verbs.main import main

SECRET = "hunter2-and-more"
RECIPE = """# @package _global_
defaults:
  - override /model: cnn
  - override /data: digits
  - override /optim: adamw
task:
  _target_: ddptrain.recipes.image.ImageClassification
"""
EVIL = ["--config-dir=THEIRS", "recipe=evil", "device=cpu"]


class Payload:
    """Unpickling it makes the canary."""

    def __init__(self, canary: str) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return open, (self._canary, "w")


class Place:
    """A folder of a stranger's files beside the one where the user stands, and all that could be hit."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.root, self.theirs, self.work = folder, folder / "theirs", folder / "work"
        self.canary = folder / "canary"
        self._capsys = capsys
        self.work.mkdir()
        (self.theirs / "recipe").mkdir(parents=True)
        (self.theirs / "payload.pkl").write_bytes(pickle.dumps(Payload(str(self.canary))))
        (self.theirs / "hubconf.py").write_text(f"open({str(self.canary)!r}, 'w')\n")
        monkeypatch.chdir(self.work)
        monkeypatch.setattr(sys, "path", sys.path[:])
        monkeypatch.setattr(sys, "argv", ["ddptrain"])
        monkeypatch.setattr(targets, "_opened", {})
        for name, value in {
            "SECRET": SECRET,
            "TORCH_HOME": str(folder / "hub"),
            "HYDRA_FULL_ERROR": "1",
        }.items():
            monkeypatch.setenv(name, value)

    def filled(self, value: Any) -> Any:
        """CANARY and THEIRS in a value's texts are the paths here."""
        if isinstance(value, dict):
            return {key: self.filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.filled(item) for item in value]
        if isinstance(value, str):
            return value.replace("CANARY", str(self.canary)).replace("THEIRS", str(self.theirs))
        return value

    def recipe(self, text: str, name: str = "recipe/evil") -> None:
        path = self.theirs / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.filled(text))

    def run_of(self, changed: dict[str, Any]) -> Path:
        """A run's folder with a saved config that was tampered with."""
        folder = self.theirs / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump({**saved(), **self.filled(changed)}))
        return folder

    def checkpoint_of(self, run: Path, payload: bytes) -> None:
        """In a run's folder, with a right manifest around whatever state."""
        checkpoint = run / "checkpoints" / "step-1"
        checkpoint.mkdir(parents=True)
        (checkpoint / STATE).write_bytes(payload)
        entry = {"sha256": hashlib.sha256(payload).hexdigest(), "bytes": len(payload)}
        manifest = {"format": FORMAT, "step": 1, "files": {STATE: entry}, "outputs": list("0123456789")}
        (checkpoint / MANIFEST).write_bytes(sealed(manifest))

    def refused(self, words: list[str]) -> str:
        """The one message with which a command line is refused; nothing else may have happened."""
        with self.untouched():
            code = main([self.filled(word) for word in words])
        printed = self._capsys.readouterr()
        assert code == 2, printed
        assert printed.err.count("ddptrain: ") == 1, printed.err
        assert printed.err.startswith("ddptrain: "), printed.err
        assert "Traceback" not in printed.err
        assert SECRET not in printed.out + printed.err
        return printed.err.removeprefix("ddptrain: ")

    @contextmanager
    def untouched(self) -> Iterator[None]:
        before, began = self._listed(), time.monotonic()
        yield
        assert not self.canary.exists(), "it was executed"
        assert self._listed() == before
        assert "LD_PRELOAD" not in os.environ
        assert time.monotonic() - began < 60  # what hostile files make endless takes for ever

    def _listed(self) -> list[tuple[str, int]]:
        return sorted((str(path), path.lstat().st_size) for path in self.root.rglob("*"))


def saved() -> dict[str, Any]:
    """The saved config of a run of cnn_digits, as far as it differs from the defaults."""
    return {
        "recipe": "cnn_digits",
        "task": {"_target_": "ddptrain.recipes.image.ImageClassification"},
        "model": {"_target_": "ddptrain.recipes.cnn.SmallCnn", "width": 8},
        "data": {
            "_target_": "ddptrain.data.images.data.ImageData",
            "source": {"_target_": "ddptrain.data.images.digits.Digits"},
            "augment": {"_target_": "ddptrain.data.images.augment.Augment", "crop": 1},
        },
        "optim": {"_target_": "torch.optim.AdamW", "lr": 0.001},
        "sched": {"_target_": "ddptrain.engine.lr_schedules.constant"},
        "strategy": {"_target_": "ddptrain.strategies.single.Single"},
        "device": "cpu",
    }
