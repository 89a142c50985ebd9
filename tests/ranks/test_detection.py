"""The detector on several ranks: the same training, normalised by the targets of all of them, and one
model's metrics the same to the last digit."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from queries import FAMILIES, write_detector
from scenes import SAMPLES, detector, library_detector, with_statistics
from toy import DIED, Fit, lr_schedule, newest_state, weights

from ddptrain.api.recipe import Data, Task
from ddptrain.api.world import World
from ddptrain.distributed.watchdog.watchdog import Watchdog
from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.evaluate import OwnBatches, evaluate
from ddptrain.engine.plan import Plan
from ddptrain.engine.precision import Precision
from ddptrain.engine.saved_checkpoint import read, unpack
from ddptrain.recipes.detection.detector import Detector
from ddptrain.recipes.detection.torchvision_detector import DetectorName, torchvision_detector
from ddptrain.recipes.detection.transformers_detector import transformers_detector
from ddptrain.testing import RankFailed, run_ranks

BATCH = 12
FEW = {
    "box_batch_size_per_image": 16,
    "box_detections_per_img": 5,
    "rpn_post_nms_top_n_train": 50,
    "rpn_post_nms_top_n_test": 20,
}
"""Of what a Mask R-CNN looks at: masks cost most of its time."""
ADAMW: dict[str, Any] = {"_target_": "torch.optim.AdamW", "lr": 2e-3}


def plan(steps: int, micro_batch: int | None = None, **changes: Any) -> Plan:
    return Plan(
        steps=steps, train_size=SAMPLES, batch_size=BATCH, micro_batch=micro_batch, eval_batch_size=4, seed=3,
        **changes,
    )  # fmt: skip


Make = Callable[[], tuple[Task, Data]]


def trained(
    make: Make, tmp_path: Path, size: int, micro_batch: int | None, lr: float, steps: int
) -> list[torch.Tensor]:
    def rank(world: World) -> torch.Tensor:
        folder = Path(tempfile.mkdtemp(dir=tmp_path)) if world.is_first else tmp_path / "unused"
        fit = Fit(plan(steps, micro_batch), optim={"_target_": "torch.optim.SGD", "lr": lr})
        state, _ = fit.train(*make(), world, folder)
        return weights(state)

    return run_ranks(rank, size, timeout=250)


def check_alike(make: Make, tmp_path: Path, lr: float, steps: int = 4) -> None:
    """The same weights after a training on any number of ranks, in any micro-batches."""
    [expected] = trained(make, tmp_path, 1, None, lr, steps)
    for size, micro_batch in ((1, 5), (2, None), (3, 2)):
        for found in trained(make, tmp_path, size, micro_batch, lr, steps):
            difference = ((found - expected).norm() / expected.norm()).item()
            assert difference < 1e-5, f"{size} ranks, micro-batches of {micro_batch}: {difference}"


@pytest.mark.parametrize("one_to_one", [False, pytest.param(True, marks=pytest.mark.long)])
def test_ranks_and_accumulation_do_not_change_the_weights(tmp_path: Path, one_to_one: bool) -> None:
    """Pictures differ in how many anchors learn something, so ranks do: a mean of the ranks' means would be
    another training."""
    make = partial(detector, batchnorm=False, multi_scale=0.5, one_to_one=one_to_one)
    check_alike(make, tmp_path, lr=0.01)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ssdlite320_mobilenet_v3_large", {}),
        ("fasterrcnn_mobilenet_v3_large_320_fpn", {}),
        ("maskrcnn_resnet50_fpn", FEW),
    ],
)
def test_nor_those_of_torchvisions_detectors(name: str, arguments: dict[str, int], tmp_path: Path) -> None:
    """What a picture draws, proposals and anchors, is its own, and so is its loss."""

    def model(num_classes: int, size: int) -> Detector:
        made = torchvision_detector(DetectorName(name), num_classes, size, frozen_norm=True, **arguments)
        return with_statistics(made)

    masks = name.startswith("mask")
    make = partial(library_detector, model, masks=masks)
    check_alike(make, tmp_path, lr=1e-3, steps=2 if masks else 4)  # masks cost a minute more


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_nor_those_of_transformers_detectors(family: str, tmp_path: Path) -> None:
    folder = str(write_detector(family, tmp_path / family))

    def model(num_classes: int, size: int) -> Detector:
        return with_statistics(transformers_detector(folder, num_classes, size, frozen_norm=True))

    check_alike(lambda: library_detector(model), tmp_path, lr=1e-4)


@pytest.mark.long
def test_one_model_is_judged_alike_on_any_world(tmp_path: Path) -> None:
    """To the last digit, also by ranks that have no validation batch at all."""
    fit = Fit(plan(150, save_every=150, eval_every=150), optim=ADAMW)
    run_ranks(lambda world: fit.train(*detector(), world, tmp_path)[0].step, 1, timeout=250)
    saved = read(Checkpointer(tmp_path, keep=1).steps()[-1])
    state = unpack(saved)["model"]

    def judged(world: World, batch_size: int) -> dict[str, float]:
        task, data = detector()
        data.prepare(world, 3)
        network = task.build()
        network.load_state_dict(state)
        batches = OwnBatches(data, data.valid_size, batch_size, world)
        precision = Precision("fp32", world.device)
        return dict(evaluate(task, network, batches, precision, Watchdog(world)).metrics)

    for batch_size in (4, 13):
        [expected] = run_ranks(lambda world, size=batch_size: judged(world, size), 1)
        assert expected["AR"] > 0, "there is something to tell apart"
        for size in (2, 3, 5):
            for found in run_ranks(lambda world, size=batch_size: judged(world, size), size):
                assert found == expected, f"{size} ranks, batches of {batch_size}"


@pytest.mark.long
@pytest.mark.parametrize(("size", "one_to_one"), [(1, False), (1, True), (2, False)])
def test_a_killed_training_ends_with_the_same_bits(tmp_path: Path, size: int, one_to_one: bool) -> None:
    """Across the end of the mosaic, with multi-scale, an average and warm-up on."""

    def run(folder: Path, stop_at: int | None) -> dict[str, Any]:
        def rank(world: World) -> dict[str, Any]:
            torch.use_deterministic_algorithms(True)
            fit = Fit(
                plan(12, save_every=3), optim=ADAMW, sched=lr_schedule(name="cosine", warmup=0.2), ema=0.9
            )
            made = detector(multi_scale=0.5, one_to_one=one_to_one)
            state, _ = fit.train(*made, world, folder, stop_at if world.is_first else None)
            return state.state_dict()

        return run_ranks(rank, size, timeout=250)[0]

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    expected = run(whole, None)
    with pytest.raises(RankFailed, match=DIED):
        run(broken, 6)
    assert newest_state(broken)["step"] == 6
    assert_same(run(broken, None), expected)
