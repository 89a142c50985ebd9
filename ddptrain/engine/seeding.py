"""Randomness inside a step (dropout) follows from (seed, step, micro-batch): no generator's state has to be
saved."""

from collections.abc import Sequence

import torch

from ddptrain.api.rng import mixed
from ddptrain.api.world import World


class StepSeed:
    """Seeds torch's default generators before each micro-batch. further_gpus: GPUs
    used beside the world's device; each has its own random numbers."""

    def __init__(self, seed: int, world: World, further_gpus: Sequence[int] = ()) -> None:
        self._seed = seed
        self._generators = [torch.default_generator]
        if world.device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[world.device.index])
        self._further = [torch.cuda.default_generators[i] for i in further_gpus]

    def __call__(self, step: int, stream: int) -> None:
        """stream: the micro-batch's number among those of all ranks in this step."""
        number = mixed(self._seed, step, stream)
        for generator in self._generators:
            generator.manual_seed(number)
        for i, generator in enumerate(self._further, start=1):
            generator.manual_seed(mixed(number, i))
