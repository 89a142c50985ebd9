"""Hydra's side of a sweep: sweeper ``grid`` makes the jobs, launcher ``gpu_pool`` packs them over GPUs."""

from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from hydra_plugins.ddptrain_sweep._running import running


class GpuPool(Launcher):
    """Each job becomes a process of its own, on GPUs of its own."""

    def __init__(self) -> None:
        self._config = DictConfig({})
        self._loader: ConfigLoader | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._loader = hydra_context.config_loader
        self._config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        assert self._loader is not None
        return running[-1].launch(self._loader, self._config, job_overrides)

    @property
    def searches(self) -> bool:
        return bool(self._config.sweep.search != "grid")

    def search(self, overrides: Sequence[Override]) -> None:
        """Points of the ranges among these, one at a time."""
        assert self._loader is not None
        running[-1].search(self._loader, self._config, overrides)


class Grid(BasicSweeper):
    """Hydra's own grid of all combinations, in one batch. The launcher composes each job's config itself, so
    that is not done twice, and no multirun.yaml is left in the current folder."""

    def __init__(self) -> None:
        super().__init__(max_batch_size=None)

    def sweep(self, arguments: list[str]) -> Any:
        assert self.launcher is not None
        assert self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides(arguments)
        if isinstance(self.launcher, GpuPool) and self.launcher.searches:
            return self.launcher.search(overrides)
        running[-1].check_grid(overrides)
        (batch,) = self.split_arguments(overrides, None)
        if not isinstance(self.launcher, GpuPool):
            self.validate_batch_is_legal(batch)
        returns = self.launcher.launch(batch, initial_job_idx=0)
        if not isinstance(self.launcher, GpuPool):
            [job.return_value for job in returns]  # raises what a job has raised
        return returns


for _group, _name, _class in (("launcher", "gpu_pool", GpuPool), ("sweeper", "grid", Grid)):
    ConfigStore.instance().store(
        group=f"hydra/{_group}",
        name=_name,
        node={"_target_": f"{_class.__module__}.{_class.__qualname__}"},
        provider="ddptrain",
    )
