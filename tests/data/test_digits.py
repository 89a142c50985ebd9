"""The digits are read from scikit-learn's file without its code, which takes longer to import."""

import sys
from pathlib import Path

import pytest
import torch
from shell import with_imports
from sklearn.datasets import load_digits

from ddptrain.data.images.digits import Digits
from ddptrain.errors import UserError


def test_they_are_those_of_scikit_learn() -> None:
    pixels, labels = load_digits(return_X_y=True)
    digits = Digits().open(Path())
    held_out = torch.arange(len(labels)) % 5 == 4
    for part, rows in ((digits.train, ~held_out), (digits.valid, held_out)):
        expected = torch.tensor(pixels)[rows].view(-1, 8, 8, 1) * (255 / 16)
        assert torch.equal(part.images(torch.arange(len(part.labels))), expected.round().to(torch.uint8))
        assert torch.equal(part.labels, torch.tensor(labels)[rows])


def test_its_code_is_not_imported(tmp_path: Path) -> None:
    ended, imported = with_imports(tmp_path, "recipe=cnn_digits device=cpu train.steps=1 observers=[]")
    assert ended.code == 0, ended.err
    assert "torch" in imported
    assert not imported & {"sklearn", "scipy"}


def test_without_it_they_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sklearn", raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(
        UserError, match="data=digits: these digits come with scikit-learn, which is not inst"
    ):
        Digits().open(Path())
