"""From Hydra's sweeper and launcher to the jobs of a sweep."""

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from ddptrain.config.arguments import GROUPS
from ddptrain.config.augment_group import Tree
from ddptrain.config.compose import is_typed, placed
from ddptrain.config.explain import plain_tree
from ddptrain.config.overrides import parsed
from ddptrain.errors import ExitCode, RankLost, UserError
from ddptrain.tools.sweep.ledger import Job
from ddptrain.tools.sweep.ranges import Choice, Numbers, Point, Range
from ddptrain.tools.sweep.run import SweepPoint, SweepRunner
from hydra_plugins.ddptrain_sweep._running import RunningSweep, running

ComposedJob = tuple[Tree, list[str]]
"""A job's config tree, and the overrides that make it."""


@contextmanager
def launching(sweep: SweepRunner, point: Callable[[Tree, list[str]], SweepPoint]) -> Iterator[None]:
    """Inside, what Hydra's sweeper comes up with goes to this. point: makes a sweep's point of a tree and the
    overrides that make it."""

    def launch(
        loader: ConfigLoader, master: DictConfig, job_overrides: Sequence[Sequence[str]]
    ) -> list[JobReturn]:
        """Run a batch of jobs; what a sweeper optimises is the best value of the task's metric."""
        make = _composer(loader, master)
        return [_returned(job) for job in sweep.run([point(*make(words)) for words in job_overrides])]

    def search(loader: ConfigLoader, master: DictConfig, overrides: Sequence[Override]) -> None:
        _search(sweep, _composer(loader, master), point, master.sweep.search, overrides)

    running.append(RunningSweep(launch, search, _check_grid))
    try:
        yield
    finally:
        running.pop()


def _check_grid(overrides: Sequence[Override]) -> None:
    """Raises UserError where a grid would need a range's values."""
    for override in overrides:
        if override.is_interval_sweep():
            raise UserError(
                f"{override.input_line}: a grid needs values: {override.get_key_element()}=0.1,0.2. Or have"
                " points of this range tried: sweep.search=tpe sweep.trials=30"
            )


def _search(
    sweep: SweepRunner,
    make: Callable[[Sequence[str]], ComposedJob],
    point: Callable[[Tree, list[str]], SweepPoint],
    method: str,
    overrides: Sequence[Override],
) -> None:
    """Search the ranges that these overrides hold. Raises UserError where one can't be searched."""
    words = {override.get_key_element(): override for override in overrides}
    ranges = [_range(name, override) for name, override in words.items() if override.is_sweep_override()]
    if not ranges:
        raise UserError(
            f"sweep.search={method}: there is no range to search. Give a key one:"
            " 'optim.lr=tag(log,interval(1e-4,1e-1))', or values: optim.lr=0.1,0.2"
        )
    fixed = {
        name: override.get_value_element_as_str()
        for name, override in words.items()
        if not override.is_sweep_override()
    }

    def sweep_point(values: Point) -> SweepPoint:
        return point(*make([f"{name}={values[name] if name in values else fixed[name]}" for name in words]))

    sweep.search(ranges, sweep_point)


def _composer(loader: ConfigLoader, master: DictConfig) -> Callable[[Sequence[str]], ComposedJob]:
    """What makes a job of its overrides.

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

    def alone(choices: Sequence[str]) -> Tree:
        return plain_tree(pickle.loads(compose(tuple(choices))[0]), resolve=False)

    @cache
    def read(word: str) -> Override:
        (override,) = parsed([word])
        return override

    def make(words: Sequence[str]) -> ComposedJob:
        overrides = [read(word) for word in words]
        choices = [override for override in overrides if override.key_or_group in GROUPS]
        base, chosen = compose(tuple(str(override.input_line) for override in choices))
        composed = pickle.loads(base)
        values = [override for override in overrides if override.key_or_group not in GROUPS]
        ConfigLoaderImpl._apply_overrides_to_config(values, composed)
        tree = placed(composed, chosen, words, alone)
        _check_sweep_places(tree, words)
        return tree, list(words)

    return make


def _check_sweep_places(tree: Tree, words: Sequence[str]) -> None:
    """Refuse what only the command line may say of how a sweep is run."""
    for name in ("dir", "options", "address"):
        value = (tree.get("sweep") or {}).get(name)
        if value and not is_typed(f"sweep.{name}", words):
            raise UserError(
                f"sweep.{name}={value}: is for the command line alone, because it writes files or starts"
                f" programs elsewhere. If you want this one, say so there: sweep.{name}=..."
            )


def _range(name: str, override: Override) -> Range:
    """What Hydra's syntax says that is searched."""
    value, word = override.value(), override.input_line
    tags: set[str] = getattr(value, "tags", set())
    if tags - {"log"} or (tags and not isinstance(value, IntervalSweep)):
        raise UserError(f"{word}: the one tag is log, of an interval: '{name}=tag(log,interval(1e-4,1e-1))'")
    if not isinstance(value, IntervalSweep):
        texts = tuple(dict.fromkeys(override.sweep_string_iterator()))
        if not texts:
            raise UserError(f"{word}: is an empty list of values.")
        if isinstance(value, RangeSweep):
            texts = tuple(sorted(texts, key=float))  # shuffle() says how a grid goes through them
            return Numbers(name, 0, len(texts) - 1, whole=True, steps=texts)
        return Choice(
            name, tuple(sorted(texts)) if isinstance(value, ChoiceSweep) and value.shuffle else texts
        )
    low, high = value.start, value.end
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(f"{word}: an interval goes from a number to a larger one.")
    if tags and low <= 0:
        raise UserError(f"{word}: a logarithmic interval begins above 0.")
    return Numbers(name, low, high, log=bool(tags), whole=isinstance(low, int) and isinstance(high, int))


def _returned(job: Job) -> JobReturn:
    done = job.status in ("done", "pruned") and job.value is not None
    failure = RankLost(f"job {job.folder}: {job.status}. {job.why}".rstrip(), ExitCode.CRASH)
    return JobReturn(
        overrides=list(job.words),
        status=JobStatus.COMPLETED if done else JobStatus.FAILED,
        _return_value=job.value if done else failure,
    )
