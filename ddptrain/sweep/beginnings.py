"""Which jobs of a sweep are the same training at their beginning, and for how many steps: derived from their
configs, and in doubt none."""

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from itertools import permutations
from pathlib import Path
from typing import Any

from ddptrain.config.instantiate import opened_packages
from ddptrain.config.schema import Config
from ddptrain.launcher.process import AGENT
from ddptrain.text import parse_json

_PATIENCE_S = 600.0
"""For the process that compares: it imports torch, and may have to open the data."""
_CHILD = """
from ddptrain.launcher.process import end_with_agent, gc_paused
end_with_agent()
with gc_paused():
    from ddptrain.commands.beginnings import answer
answer(sys.argv[1])
"""
_OF_LENGTH = ("steps", "epochs")
_OPTIMIZERS = ("torch.optim.", "ddptrain.recipes.")
"""Which put every parameter at ``optim.lr`` or a group's; another one may have rates of its own."""


class Beginnings:
    """What the jobs of a sweep have in common, by their numbers."""

    def __init__(self, configs: Mapping[int, Config]) -> None:
        self.configs = configs
        self.problem = ""
        """Why nothing is known."""
        self.note = ""
        """Why some share less than they might."""
        self.steps: dict[int, int] = {}
        """Of each job that may share: how many it has."""
        self.train_size: dict[int, int | None] = {}
        """Of its data, where its steps follow from that."""
        self._common: dict[tuple[int, int], int] = {}
        self._family: dict[int, str] = {}
        families: dict[str, list[int]] = defaultdict(list)
        for number, config in configs.items():
            if may_share(config):
                families[family_of(asdict(config))].append(number)
        self._families = {key: members for key, members in families.items() if len(members) > 1}
        for key, members in self._families.items():
            self._family |= dict.fromkeys(members, key)
        if self._families:
            self._ask(configs)

    def relatives(self, number: int) -> list[int]:
        """Jobs that may have something in common with this one, itself among them."""
        return self._families.get(self._family.get(number, ""), [])

    def common(self, one: int, other: int) -> int:
        """Steps from the start in which two jobs are the same training."""
        return self._common.get((one, other), 0)

    def divide(self, number: int, only_lengths: bool) -> bool:
        """A job's family turns out to have nothing in common. only_lengths: where lengths differ. Returns
        whether that is new."""
        apart = [
            pair
            for pair in permutations(self.relatives(number), 2)
            if pair in self._common and not (only_lengths and self.steps[pair[0]] == self.steps[pair[1]])
        ]
        for pair in apart:
            del self._common[pair]
        return bool(apart)

    def _ask(self, configs: Mapping[int, Config]) -> None:
        sets: dict[str, dict[str, Any]] = {}
        families: list[dict[str, Any]] = []
        for members in self._families.values():
            first, runs = configs[members[0]], [_run_of(configs[number]) for number in members]
            counted = any(run["steps"] is None for run in runs)
            place = None
            if counted or len({run["steps"] for run in runs}) > 1:
                key = json.dumps(first.data)
                one = sets.setdefault(key, {"node": first.data, "seed": first.seed, "counted": False})
                one["counted"] |= counted
                place = list(sets).index(key)
            families.append({"optim": first.optim, "runs": runs, "data": place})
        told = _told({"packages": opened_packages(), "data": list(sets.values()), "families": families})
        self.problem = told.get("problem", "")
        if self.problem:
            return
        for members, asked, found in zip(self._families.values(), families, told["families"], strict=True):
            data = {} if asked["data"] is None else told["data"][asked["data"]]
            for number, steps in zip(members, found["steps"], strict=True):
                self.steps[number], self.train_size[number] = steps, data.get("size")
            for i, j, steps in found["common"]:
                self._common[members[i], members[j]] = self._common[members[j], members[i]] = steps
            if data.get("reads_progress") and self.divide(members[0], only_lengths=True):
                self.note = (
                    "jobs of other lengths share nothing: their data may depend on it (Data.reads_progress)"
                )


def _run_of(config: Config) -> dict[str, Any]:
    train = config.train
    shape = {"sched": asdict(config.sched), "thaw": config.thaw}
    return {**shape, "steps": train.steps, "epochs": train.epochs, "batch_size": train.batch_size}


def may_share(config: Config) -> bool:
    """Whether a run is known to depend on its length and its rates only in ways that are looked at."""
    train, stop = config.train, config.stop
    return not (
        config.controllers  # each may look at the length
        or stop.patience is not None
        or stop.target is not None
        or config.run.resume != "auto"
        or "auto" in (train.micro_batch, train.eval_batch_size)  # found by each run for itself
        or config.optim.get("layer_decay") is not None  # rates follow from the model
        or not isinstance(config.optim.get("lr"), int | float)
        or not str(config.optim.get("_target_")).startswith(_OPTIMIZERS)
    )


def family_of(tree: Mapping[str, Any]) -> str:
    """All of a config tree but what decides on the length, the rates, and when what is frozen thaws; whether
    it ever does counts, for then the optimizer has it.

    Of compiled code nobody knows whether it reads the progress: there the length counts.
    """
    train = dict(tree["train"])
    train.pop("step_limit", None)
    lengths = [train.pop(name) for name in _OF_LENGTH]
    left_out = ("train", "sched", "thaw", "run", "sweep", "device")  # the device is one for all jobs
    rest = {name: value for name, value in tree.items() if name not in left_out}
    known = [train, tree["thaw"] is None, lengths if tree["compile"] != "off" else None]
    return json.dumps([rest, *known], sort_keys=True, default=str)


def _told(asked: Mapping[str, Any]) -> Any:
    """What `ddptrain.commands.beginnings` answers."""
    find = f"import sys; sys.path[:] = {sys.path!r}"  # the same modules as this process
    with tempfile.TemporaryDirectory(prefix="ddptrain-") as folder:
        file = Path(folder, "answer.json")
        try:
            child = subprocess.run(
                [sys.executable, "-c", f"{find}{_CHILD}", str(file)],
                env={**os.environ, AGENT: str(os.getpid())},
                input=json.dumps(asked),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_PATIENCE_S,
            )
        except subprocess.TimeoutExpired:
            return {"problem": f"what jobs have in common was not found in {_PATIENCE_S:.0f} s"}
        if child.returncode:
            return {"problem": (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]}
        return parse_json(file.read_text())
