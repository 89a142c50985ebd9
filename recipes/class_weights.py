"""Factors of the classes' losses."""

from typing import Literal, final

import torch
from torch import Tensor

from ddptrain.api import Data, UserError
from ddptrain.data.images.data import ImageData


@final
class ClassWeights:
    """``task.class_weights``: None, a number for each class, or ``balanced``, which follows from the data."""

    def __init__(self, weights: Literal["balanced"] | list[float] | None) -> None:
        if isinstance(weights, list) and not all(weight > 0 for weight in weights):
            raise UserError(f"task.class_weights={weights}: must be positive numbers.")
        self._configured = weights
        self._weights: Tensor | None = None

    def prepare(self, data: Data) -> None:
        """With the prepared data, before training. Raises UserError where there are not as many as classes,
        or the data have no counts of classes.

        Balanced: n / (classes * n_c) for n training samples, n_c of them of the class; the mean over all
        samples is 1. Of several labels a sample: (n - n_c) / n_c, the factor of the class's positives; 1
        where all samples have the class.
        """
        classes = len(data.outputs)
        if isinstance(self._configured, list):
            if len(self._configured) != classes:
                raise UserError(
                    f"task.class_weights: has {len(self._configured)} numbers; the data have {classes}"
                    " classes."
                )
            self._weights = torch.tensor(self._configured)
        elif self._configured == "balanced":
            if not isinstance(data, ImageData):
                raise UserError(
                    "task.class_weights=balanced: needs data of ddptrain.data.images.data.ImageData, which"
                    f" counts its classes; {type(data).__name__} does not. Give a list of numbers."
                )
            if data.recalled:  # no training follows
                return
            counts = data.class_counts.double()
            if not counts.all():
                name = data.outputs[int(counts.argmin())]
                raise UserError(f"task.class_weights=balanced: class {name!r} has no training sample.")
            several = torch.where(counts < data.train_size, (data.train_size - counts) / counts, 1.0)
            one = counts.sum() / (classes * counts)
            self._weights = (several if data.multi_label else one).float()

    def on(self, device: torch.device) -> Tensor | None:
        """float32 (classes,) there, or None for equal weights."""
        if self._weights is not None and self._weights.device != device:
            self._weights = self._weights.to(device)  # once
        return self._weights
