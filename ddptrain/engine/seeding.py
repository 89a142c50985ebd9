"""What is random inside a step (dropout) follows from (seed, step, micro-batch), so no generator's
state has to be saved."""

import torch

from ddptrain.data.dice import mixed
from ddptrain.distributed.world import World


class StepSeed:
    """Seeds torch's default generators before each micro-batch."""

    def __init__(self, seed: int, world: World) -> None:
        self._seed = seed
        self._generators = [torch.default_generator]
        if world.device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[world.device.index])

    def __call__(self, step: int, stream: int) -> None:
        """stream: the micro-batch's number among those of all ranks in this step."""
        number = mixed(self._seed, step, stream)
        for generator in self._generators:
            generator.manual_seed(number)
