"""Randomness inside a step (dropout) follows from (seed, step, micro-batch), that of an evaluation from the
batch: no state has to be saved."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ddptrain.api.rng import derive_seed, seed_pythons, state_of_pythons
from ddptrain.api.world import World
from ddptrain.data.generators import restored


class StepSeed:
    """Seeds torch's default generators before each micro-batch, those of further GPUs by other numbers; those
    of Python and NumPy where they are used (that takes 20 us)."""

    def __init__(self, seed: int, world: World, further_gpus: Sequence[int] = ()) -> None:
        self._seed = seed
        self._seeders = _seeders(world.device)
        self._captured: Mapping[int, torch.Generator] = {}
        self._further = [torch.cuda.default_generators[i] for i in further_gpus]

    @property
    def seeds_pythons(self) -> bool:
        """Whether the generators of Python and NumPy are used."""
        return seed_pythons in self._seeders

    @contextmanager
    def taken_from(self, generators: Mapping[int, torch.Generator]) -> Iterator[None]:
        """Inside, while a CUDA graph captures, a micro-batch draws from the generator of its stream, which is
        to be seeded before each replay."""
        default = torch.cuda.default_generators[torch.cuda.current_device()]
        own = default.graphsafe_get_state()
        self._captured = generators
        try:
            yield
        finally:
            self._captured = {}
            default.graphsafe_set_state(own)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a first pass: if it draws from the generators of Python or NumPy, they are seeded, too, from
        here on."""
        before = state_of_pythons()
        yield
        if state_of_pythons() != before and seed_pythons not in self._seeders:
            self._seeders.append(seed_pythons)

    def seed_captured(self, generators: Mapping[int, torch.Generator], step: int) -> None:
        """Before a replay: those of `taken_from`, as the default ones are seeded in an eager step."""
        for stream, generator in generators.items():
            generator.manual_seed(self._number(step, stream))

    def _number(self, step: int, stream: int) -> int:
        return derive_seed(self._seed, step, stream)

    def __call__(self, step: int, stream: int) -> None:
        """stream: the micro-batch's number among those of all ranks in this step."""
        if self._captured:
            default = torch.cuda.default_generators[torch.cuda.current_device()]
            default.graphsafe_set_state(self._captured[stream])
            return
        number = self._number(step, stream)
        for seed in self._seeders:
            seed(number)
        for i, generator in enumerate(self._further, start=1):
            generator.manual_seed(derive_seed(number, i))


@contextmanager
def drawing_apart(device: torch.device) -> Iterator[Callable[[int], None]]:
    """Around an evaluation: what it draws changes nothing that is drawn afterwards. Gives what seeds all
    generators by the number of a batch, so that each evaluation draws the same, on any number of ranks."""
    seeders = [*_seeders(device), seed_pythons]

    def seed_all(batch: int) -> None:
        number = derive_seed(batch)
        for seed in seeders:
            seed(number)

    with restored(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield seed_all


def _seeders(device: torch.device) -> list[Callable[[int], object]]:
    """Of torch's default generators: the CPU's, and the device's."""
    # not torch.manual_seed, which seeds those of all devices
    seeders: list[Callable[[int], object]] = [torch.default_generator.manual_seed]
    if device.type == "cuda":
        seeders.append(torch.cuda.default_generators[device.index].manual_seed)
    if device.type == "mps":
        seeders.append(torch.mps.manual_seed)
    return seeders
