"""train.micro_batch=auto: as many samples as every rank has room for, found without a hang."""

import random
from pathlib import Path

import pytest
import torch
from compare import assert_same
from shell import Ended, ddptrain, refusal
from torch import Tensor, nn
from toy import CLASSES, FEATURES, Classify, Vectors, auto, strict

from ddptrain.api.world import World
from ddptrain.distributed.watchdog.watchdog import Watchdog
from ddptrain.engine.auto_batch import AutoBatch
from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.plan import Plan
from ddptrain.engine.precision import Precision
from ddptrain.engine.saved_checkpoint import unpack
from ddptrain.errors import UserError
from ddptrain.run.setup import make_strategy
from ddptrain.testing import run_ranks

BATCH = 90
MODEL = '''
import os
import torch
from torch import nn

class Small(nn.Module):
    """Room for 20 samples at once on rank 0, and for 9 on others; for three times as many in evaluation."""

    def __init__(self, num_classes: int, in_channels: int, image_size: tuple[int, int], **sizes) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(in_channels)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(in_channels * image_size[0] * image_size[1], num_classes)

    def forward(self, images):
        room = (20 if os.environ.get("RANK", "0") == "0" else 9) * (1 if torch.is_grad_enabled() else 3)
        if len(images) > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")
        return self.head(self.drop(self.norm(images)).flatten(1))
'''
WORDS = "--config-dir=mine recipe=cnn_digits model._target_=small_room.Small device=cpu train.batch_size=64"
RUN = f"{WORDS} train.steps=8 train.eval_every=4 checkpoint.every=2 observers=[jsonl]"


class Roomy(nn.Module):
    """Takes so many samples at once."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.norm = nn.BatchNorm1d(FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        if len(features) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")
        logits: Tensor = self.head(self.norm(features))
        return logits


def expected(share: int, room: int) -> int:
    return max(size for parts in range(1, share + 1) if (size := -(-share // parts)) <= room)


@pytest.mark.parametrize(("shards", "tries"), [(None, 100), (6, 10)])
def test_all_ranks_take_what_the_smallest_has_room_for(shards: int | None, tries: int) -> None:
    def rank(world: World) -> list[tuple[int | None, int]]:
        found, draw = [], random.Random(3)
        for _ in range(tries):
            rooms = [draw.randint(2, 40) for _ in range(world.size)]
            torch.manual_seed(0)
            model, data = Roomy(rooms[world.rank]), Vectors(200)
            before = {name: value.clone() for name, value in model.state_dict().items()}
            plan = Plan(steps=5, train_size=200, batch_size=BATCH, shards=shards)
            strategy = make_strategy(auto() if shards is None else strict(shards), world)
            task = Classify(nn.Identity)
            trial = AutoBatch(task, model, data, Precision("fp32", world.device), plan, strategy)
            sized = trial.sized("auto", "auto", {}, Watchdog(world))
            assert_same(before, dict(model.state_dict()))
            assert all(parameter.grad is None for parameter in model.parameters())
            assert sized.micro_batch == expected(BATCH // (shards or world.size), min(rooms))
            assert sized.eval_batch_size <= min(rooms)
            found.append((sized.micro_batch, sized.eval_batch_size))
        return found

    ranks = run_ranks(rank, 3)
    assert ranks[0] == ranks[1] == ranks[2]
    assert len(set(ranks[0])) > 3


def test_where_all_fits_no_rank_cuts_its_share() -> None:
    """64 samples on three ranks: 21, 21 and 22."""

    def rank(world: World) -> int | None:
        plan = Plan(steps=5, train_size=200, batch_size=64)
        strategy = make_strategy(auto(), world)
        precision = Precision("fp32", world.device)
        trial = AutoBatch(Classify(nn.Identity), Roomy(99), Vectors(200), precision, plan, strategy)
        return trial.sized("auto", 256, {}, Watchdog(world)).micro_batch

    assert run_ranks(rank, 3) == [22, 22, 22]


def test_no_room_at_all_is_said() -> None:
    world = World()
    plan = Plan(steps=5, train_size=200, batch_size=BATCH)
    model = Roomy(0)
    strategy = make_strategy(auto(), world)
    task = Classify(nn.Identity)
    trial = AutoBatch(task, model, Vectors(200), Precision("fp32", world.device), plan, strategy)
    with pytest.raises(
        UserError, match=r"^train\.micro_batch=auto: rank 0 has no room for a single sample \(CUDA"
    ):
        trial.sized("auto", 256, {}, Watchdog(world))


@pytest.mark.long
def test_the_run_is_that_of_the_number_written_out_killed_or_not(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/small_room.py").write_text(MODEL)

    def train(run: str, words: str) -> Ended:
        return ddptrain(tmp_path, f"launch --nproc-per-node=2 {RUN} run.dir={run} {words}")

    found = train("auto", "train.micro_batch=auto train.eval_batch_size=auto")
    assert found.code == 0, found.err
    assert "fits       train.micro_batch=8 (auto)" in found.out + found.err  # 32 in four parts
    assert "fits       train.eval_batch_size=16 (auto)" in found.out + found.err  # 32, of which 27 have room
    assert train("written", "train.micro_batch=8 train.eval_batch_size=16").code == 0
    assert train("killed", "train.micro_batch=auto train.eval_batch_size=auto train.steps=4").code == 0
    gone_on = train("killed", "train.micro_batch=auto train.eval_batch_size=auto")
    assert "resumed    " in gone_on.out + gone_on.err
    assert "kept       train.micro_batch=8 (auto)" in gone_on.out + gone_on.err
    states = []
    for run in ("auto", "written", "killed"):
        saved = Checkpointer(tmp_path / run / "checkpoints", keep=2).newest()
        assert saved is not None
        states.append(unpack(saved)["model"])
        assert "micro_batch: 8\n" in (tmp_path / run / "config.yaml").read_text()
    assert_same(states[0], states[1])
    metrics = [(tmp_path / run / "metrics.jsonl").read_bytes() for run in ("auto", "written")]
    assert metrics[0] == metrics[1]
    too_many = train("too-many", "train.micro_batch=16")
    assert too_many.code == 2
    assert "train.micro_batch=8 (now 16); the global batch stays" in too_many.err
    for word in ("train.micro_batch=most", "train.eval_batch_size=1.5", "train.micro_batch=0"):
        assert refusal(tmp_path, f"{WORDS} {word}").startswith(f"{word}: must be ")
