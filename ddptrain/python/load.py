"""``ddptrain.load``: a trained model, ready to be asked."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from ddptrain.errors import UserError
from ddptrain.python.loaded import loaded
from ddptrain.python.run import Run


@final
@dataclass(frozen=True, slots=True)
class Trained:
    """A checkpoint of a run as a module."""

    module: nn.Module
    """In evaluation mode, its parameters without gradients, on its device; the averaged weights where there
    are some (``ema.decay``)."""
    classes: tuple[str, ...]
    """What the module's outputs stand for: classes, characters. Empty if they have no names."""
    preprocess: Callable[[Any], Tensor]
    """The module's input, on its device, of one thing: `ddptrain.api.Data.preprocess`. Of a picture, a file's
    path or a PIL image: float32 (1, C, H, W), the pixels that the verb ``predict`` sees."""
    predict: Callable[..., Any]
    """What the model says of one thing, a picture's path or a PIL image: `ddptrain.api.Task.predict_sample`.
    A classifier: each class's probability by its name, the likeliest first. A segmentation: uint8 (H, W),
    each pixel's class. A detector, given a least ``score`` (0.25): boxes, scores, names and masks, as
    `ddptrain.recipes.detection.predict.Predicted` has them."""
    checkpoint: Path
    """The checkpoint's folder."""


def load(
    run: Run | str | os.PathLike[str],
    *words: str,
    checkpoint: str | None = None,
    device: str | torch.device = "cpu",
) -> Trained:
    """A model trained by the run in a folder, in this process.

    words: overrides of the run's saved config, and the ``--config-dir=<folder>`` of a recipe of one's own.
    checkpoint: ``best``, ``last``, ``step-<n>`` or a checkpoint's folder; None: the best one where there is
    one, else the last. device: as the key ``device``. Needs the data set only where the checkpoint does not
    say enough about it. Raises UserError.
    """
    for word in words:
        if word.startswith(("run=", "checkpoint=", "device=")):
            raise UserError(f"{word}: is an argument of load: load(run, checkpoint=..., device=...)")
    given = (run.folder, run.options, run.objects) if isinstance(run, Run) else (os.fspath(run), (), None)
    folder, options, objects = given
    module, task, data, path = loaded(folder, (*options, *words), checkpoint or "", str(device), objects)
    return Trained(module, tuple(data.outputs), data.preprocess, partial(task.predict_sample, module), path)
