"""From Hydra's sweeper and launcher to the jobs of a sweep."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from ddptrain.cli.argv import GROUPS
from ddptrain.cli.augment_group import Tree, place_augment
from ddptrain.cli.compose import check_places, parsed, tree_of
from ddptrain.errors import ExitCode, RankLost
from ddptrain.sweep.ledger import Job

Sweep = Callable[[list[tuple[Tree, list[str]]]], Sequence[Job]]
"""Runs jobs, given as trees and the overrides that make them; returns these with their outcomes."""
_sweeps: list[Sweep] = []
"""Hydra makes the launcher itself, and hands it nothing of ours."""


@contextmanager
def launching(sweep: Sweep) -> Iterator[None]:
    """Inside, the jobs that Hydra's sweeper comes up with go to this."""
    _sweeps.append(sweep)
    try:
        yield
    finally:
        _sweeps.pop()


def launch(
    loader: ConfigLoader, master: DictConfig, job_overrides: Sequence[Sequence[str]]
) -> list[JobReturn]:
    """Run a batch of jobs; what a sweeper optimises is the best value of the task's metric.

    Composes as Hydra's own `load_sweep_config` does, but each choice of groups only once: the values are put
    in afterwards in any case, and 100 jobs cost a second and not five.
    """

    @cache
    def compose(choices: tuple[str, ...]) -> tuple[bytes, dict[str, Any]]:
        composed = loader.load_configuration(
            master.hydra.job.config_name,
            overrides=[*master.hydra.overrides.hydra, *choices],
            run_mode=RunMode.RUN,
        )
        chosen = dict(composed.hydra.runtime.choices)
        with open_dict(composed):
            del composed["hydra"]
        OmegaConf.set_struct(composed, True)
        return pickle.dumps(composed), chosen  # to copy it is six times slower

    @cache
    def read(word: str) -> Override:
        (override,) = parsed([word])
        return override

    jobs = []
    for words in job_overrides:
        overrides = [read(word) for word in words]
        choices = [override for override in overrides if override.key_or_group in GROUPS]
        base, chosen = compose(tuple(str(override.input_line) for override in choices))
        composed = pickle.loads(base)
        values = [override for override in overrides if override.key_or_group not in GROUPS]
        ConfigLoaderImpl._apply_overrides_to_config(values, composed)
        tree = place_augment(tree_of(composed, chosen), words)
        check_places(tree, words)
        jobs.append((tree, list(words)))
    return [_returned(job) for job in _sweeps[-1](jobs)]


def _returned(job: Job) -> JobReturn:
    done = job.status in ("done", "pruned") and job.value is not None
    failure = RankLost(f"job {job.folder}: {job.status}. {job.why}".rstrip(), ExitCode.CRASH)
    return JobReturn(
        overrides=list(job.words),
        status=JobStatus.COMPLETED if done else JobStatus.FAILED,
        _return_value=job.value if done else failure,
    )
