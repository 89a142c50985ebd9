"""The host waits for the device in no loss and in no evaluation of a batch, seen without one: a tensor on
``meta`` has no numbers, so whatever would bring one to the host raises: item, tolist, cpu, nonzero, a mask as
an index, bincount."""

from pathlib import Path

import pytest
import torch
from composed import RECIPES, made
from torch import Tensor

from ddptrain.api.recipe import Progress
from ddptrain.api.sampler import Sampler
from ddptrain.data.prefetch import to_device
from ddptrain.run.setup import make_model

META = torch.device("meta")
# the same as yolo_shapes; and torchvision's detectors, which wait everywhere
TASKS = [name for name in RECIPES if name not in ("yolo_coco", "yolo_custom", "detection")]


@pytest.mark.parametrize("recipe", [*TASKS, "yolo_shapes model.one_to_one=true"])
def test_neither_loss_nor_evaluation_waits_for_the_device(recipe: str, tmp_path: Path) -> None:
    name, *words = recipe.split()
    config, task, data = made(name, tmp_path, *words)
    model = make_model(config, task, META).train()
    [batch] = data.train_batches(Sampler(data.train_size, 4, seed=0), range(1))
    task.loss(model, to_device(batch, META), Progress(0, 0, 0.0)).sum.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    if name == "yolo_shapes":  # only the device knows how many boxes a suppression of doubles leaves
        return
    [batch] = data.valid_batches([range(2)])
    with torch.inference_mode():
        found = task.evaluate(model.eval(), to_device(batch, META))
    assert found
    assert all(isinstance(value, Tensor) and value.is_meta for value in found.values())
