"""Each augmentation, in real runs: the same bits on 1, 2 and 3 ranks, with any workers, killed or not."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compare import assert_same
from shell import ddptrain

from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.saved_checkpoint import unpack

MIX = "augment.mix={_target_: ddptrain.data.images.mixing.Mix, mixup: %s, cutmix: %s}"
PLAIN = ["augment=light", "augment.resized_crop=null", "augment.transforms.horizontal_flip=null"]


def torchvisions(name: str, **arguments: float) -> str:
    """A word that adds a transform."""
    pairs = "".join(f", {key}: {value}" for key, value in arguments.items())
    return f"+augment.transforms.one={{_target_: torchvision.transforms.v2.{name}{pairs}}}"


AUGMENTS = {
    "crops": ["augment=light", "augment.transforms.horizontal_flip=null"],
    "flips": ["augment=light", "augment.resized_crop=null", torchvisions("RandomVerticalFlip", p=0.5)],
    "jitter": [*PLAIN, torchvisions("ColorJitter", brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)],
    "trivial": [*PLAIN, torchvisions("TrivialAugmentWide")],
    "rand": [*PLAIN, torchvisions("RandAugment", num_ops=2, magnitude=9)],
    "erasing": [*PLAIN, torchvisions("RandomErasing", p=0.5)],
    "mixup": [*PLAIN, MIX % (0.8, 0)],
    "cutmix": [*PLAIN, MIX % (0, 1.0)],
    "strong": ["augment=strong"],
    "the device's own": ["data.augment.brightness=0.2", "data.augment.cutout=8"],
}
SET = (
    "recipe=cnn_cifar10 data=shapes data.source.train=100 data.source.valid=20 train.batch_size=24 device=cpu"
    " model.width=8 observers=[jsonl] train.steps=10 checkpoint.every=5 train.eval_every=5"
    " data.resident=false"
)
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def state_of(home: Path, augment: list[str], ranks: int, workers: int) -> Any:
    run = f"run-{ranks}"
    words = f"launch --nproc-per-node={ranks} {SET} strategy=strict data.workers={workers} run.dir={run}"
    done = ddptrain(home, [*words.split(), *augment], **ONE_THREAD)
    assert done.code == 0, done.err
    saved = Checkpointer(home / run / "checkpoints", keep=1).newest()
    assert saved is not None
    return unpack(saved)["model"]


@pytest.mark.long
@pytest.mark.parametrize("name", AUGMENTS)
def test_ranks_and_workers_change_no_bit(tmp_path: Path, name: str) -> None:
    alone = state_of(tmp_path, AUGMENTS[name], 1, 0)
    for ranks, workers in ((2, 2), (3, 1)):
        assert_same(alone, state_of(tmp_path, AUGMENTS[name], ranks, workers))


@pytest.mark.long
@pytest.mark.parametrize("name", AUGMENTS)
def test_nor_does_a_kill(tmp_path: Path, name: str) -> None:
    words = f"-m ddptrain prove resume ranks=2 kills=2 {SET} data.workers=2"
    done = subprocess.run(
        [sys.executable, *words.split(), *AUGMENTS[name]],
        cwd=tmp_path, env={**os.environ, **ONE_THREAD}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prove resume: HOLDS: killed 2 times" in done.stdout
