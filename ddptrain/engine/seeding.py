"""What is random inside a step (dropout) follows from (seed, step, rank), so no generator's state
has to be saved."""

import torch

from ddptrain.data.dice import mixed
from ddptrain.distributed.world import World


class StepSeed:
    """Seeds torch's default generators at the start of each step."""

    def __init__(self, seed: int, world: World) -> None:
        self._seed = seed
        self._rank = world.rank
        self._generators = [torch.default_generator]
        if world.device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[world.device.index])

    def __call__(self, step: int) -> None:
        number = mixed(self._seed, step, self._rank)
        for generator in self._generators:
            generator.manual_seed(number)
