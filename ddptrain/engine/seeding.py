"""Randomness inside a step (dropout) follows from (seed, step, micro-batch): no state has to be saved."""

from collections.abc import Callable, Sequence

import torch

from ddptrain.api.rng import mixed
from ddptrain.api.world import World


class StepSeed:
    """Seeds torch's default generators before each micro-batch, those of further GPUs by other numbers."""

    def __init__(self, seed: int, world: World, further_gpus: Sequence[int] = ()) -> None:
        self._seed = seed
        self._seeders: list[Callable[[int], object]] = [torch.default_generator.manual_seed]
        if world.device.type == "cuda":
            self._seeders.append(torch.cuda.default_generators[world.device.index].manual_seed)
        if world.device.type == "mps":
            self._seeders.append(torch.mps.manual_seed)
        self._further = [torch.cuda.default_generators[i] for i in further_gpus]

    def __call__(self, step: int, stream: int) -> None:
        """stream: the micro-batch's number among those of all ranks in this step."""
        number = mixed(self._seed, step, stream)
        for seed in self._seeders:
            seed(number)
        for i, generator in enumerate(self._further, start=1):
            generator.manual_seed(mixed(number, i))
