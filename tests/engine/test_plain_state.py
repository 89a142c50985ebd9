"""What a checkpoint could not give back is refused before it is written."""

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from toy import CLASSES, FEATURES, Fit

from ddptrain.api.controller import Controller
from ddptrain.api.observer import Evaluated
from ddptrain.api.world import World
from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.plain_state import check_plain
from ddptrain.engine.plan import Plan
from ddptrain.engine.saved_checkpoint import read, unpack
from ddptrain.errors import UserError

PLAIN: dict[str, Any] = {
    "none": None, "number": 1, "truth": True, "text": "a", "bytes": b"a", "complex": 1j, "nan": float("nan"),
    "list": [1, "a", [2.0]], "tuple": (1, torch.ones(2)), "dict": {1: {"a": torch.zeros(0)}},
    "ordered": OrderedDict(a=1), "set": {1, 2}, "dtype": torch.int64, "size": torch.Size([2]),
    "device": torch.device("cpu"), "parameter": torch.nn.Parameter(torch.ones(2)),
}  # fmt: skip
OTHERS: dict[str, Any] = {
    "float64": np.float64(1.5), "array": np.ones(2), "path": Path("a"), "deque": deque([1]),
    "counter": Counter(a=1), "bytearray": bytearray(b"a"),
    "range": range(3), "function": len, "key": {np.int64(1): 2}, "deep": {"a": [1, (2, np.float32(3))]},
}  # fmt: skip


class Keeping(Controller):
    def __init__(self, value: Any, later: Any = None) -> None:
        self._value, self._later = value, later

    def goes_on(self, event: Evaluated) -> bool:
        self._value = self._value if self._later is None else self._later
        return True

    def state_dict(self) -> Mapping[str, Any]:
        return {"kept": self._value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._value = state.get("kept")


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_values_come_back(kind: str, tmp_path: Path) -> None:
    check_plain({"own": PLAIN[kind]})
    state = {"model": {}, "optimizer": {}, "step": 1, "own": PLAIN[kind]}
    Checkpointer(tmp_path, keep=1).save(state, {"step": 1})
    assert repr(unpack(read(tmp_path / "step-1"))["own"]) == repr(PLAIN[kind])


@pytest.mark.parametrize("kind", OTHERS)
def test_a_controllers_state_is_looked_at_before_the_first_step(kind: str, tmp_path: Path) -> None:
    plan = Plan(steps=2, train_size=20, batch_size=10)
    with pytest.raises(UserError, match=r"checkpoint: controllers.own.kept.* could not be loaded again"):
        Fit(plan, controllers={"own": Keeping(OTHERS[kind])}).run(World(), tmp_path)


@pytest.mark.parametrize("kind", OTHERS)
def test_so_is_a_layers(kind: str, tmp_path: Path) -> None:
    class Keeps(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"kept": OTHERS[kind]}

    plan = Plan(steps=2, train_size=20, batch_size=10)
    with pytest.raises(UserError, match=r"checkpoint: model._extra_state.kept.* could not be loaded again"):
        Fit(plan, make_model=lambda: Keeps(FEATURES, CLASSES)).run(World(), tmp_path)


def test_and_at_each_save(tmp_path: Path) -> None:
    plan = Plan(steps=6, train_size=20, batch_size=10, eval_every=2, save_every=3)
    with pytest.raises(UserError, match=r"checkpoint: controllers.own.kept is a collections.deque"):
        Fit(plan, controllers={"own": Keeping(1, deque([1]))}).run(World(), tmp_path)
    assert not (tmp_path / "step-3").exists()
