"""``ddptrain.fit``: train your own module on your own data with your own loss (docs/fit.md)."""

import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ddptrain.api.recipe import Batch, Loss
from ddptrain.config.arguments import SCRIPT, TRUST, Arguments
from ddptrain.config.targets import packages_restored
from ddptrain.data.generators import restored
from ddptrain.distributed.launcher.process import OBJECTS, leave
from ddptrain.errors import ExitCode, UserError
from ddptrain.keys import did_you_mean, key_of
from ddptrain.python.objects import objects_of, write_objects
from ddptrain.python.run import Run
from ddptrain.python.train import check_options, train_in_processes
from ddptrain.recipes.given import Objects, give
from ddptrain.run.train import run
from ddptrain.text import quoted
from ddptrain.verbs.argv import parse
from ddptrain.verbs.composing import composed, own_options, recorded
from ddptrain.verbs.main import main
from ddptrain.verbs.script import FIT_INTO

_calls = itertools.count(1)
"""Of `fit`, in one of torchrun's processes."""


def fit(
    model: nn.Module | Callable[[], nn.Module],
    train: Any,
    valid: Any = None,
    *words: str,
    loss: Callable[[Any, Any], Tensor] | None = None,
    step: Callable[[nn.Module, Batch], Tensor | Loss] | None = None,
    metrics: Mapping[str, Callable[..., Any]] | Callable[..., Any] | None = None,
    best: str | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    optimizer: str | None = None,
    lr: float | None = None,
    ranks: int | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    trust: str | Sequence[str] = (),
    **others: Any,
) -> Run:
    """Train ``model`` on ``train``, measure it on ``valid``, and wait for the end.

    In a script or a notebook the training has ``ranks`` processes of its own (default 1), to which the
    objects are sent; under ``torchrun script.py`` it is done by these ranks. The same call with the same
    ``run_dir`` goes on where it stopped, and returns without a step where it had finished. ``model`` itself
    is not changed: the trained one is ``run.model``.

    - model: a module on the CPU, or a function that makes one (then its weights follow from ``seed``).
    - train, valid: map-style datasets whose samples are (input, target) or (*inputs, target); tuples of
      tensors whose row i is sample i; or DataLoaders, of which dataset, batch size, collate and workers are
      taken. Without ``valid`` every tenth sample of ``train`` is held out.
    - words: overrides, as on the command line: ``"strategy=fsdp"``, ``"precision=bf16"``. A word counts more
      than an argument for the same key.
    - loss: a module or function of (output, target) that returns the mean over the samples, their sum, or one
      value for each.
    - step: in place of loss, a function of (model, batch) that returns such a value or a
      `ddptrain.api.Loss`.
    - metrics: by name, metrics of torchmetrics or functions of (output, target).
    - best: the metric that decides on ``checkpoints/best``; default: the validation loss.
    - epochs: above 0, may be a fraction. batch_size: samples of one optimizer step over all ranks.
      optimizer: a name of the group ``optim``: adamw (default), adam, sgd, rmsprop. lr: its learning rate,
      which is constant unless a word says ``sched=cosine``.
    - ranks: processes, usually one per GPU. run_dir: the run's folder; default: a new one below ``runs/fit``.
    - others: there are none; an unknown argument raises UserError, which names the one that was probably
      meant.
    - trust: names of installed packages whose classes the words may name, as
      ``"optim._target_=<package>.<class>"`` does.

    Raises UserError, a ValueError, for what the caller can mend; RuntimeError with the end of the log where
    the training has failed; KeyboardInterrupt at a second Ctrl-C: the first one saves and returns the run.
    """
    if isinstance(valid, str):
        words, valid = (valid, *words), None
    named = {
        "train.epochs": epochs, "train.batch_size": batch_size, "optim": optimizer, "optim.lr": lr,
        "task.best_metric": best and quoted(best), "run.dir": run_dir and quoted(os.fspath(run_dir)),
    }  # fmt: skip

    def given() -> tuple[Objects, list[str]]:
        """And the config's words."""
        if isinstance(train, str):
            raise UserError(f"train={train!r}: is a word; words follow the model and the data.")
        if not isinstance(optimizer, str | None):
            kind = optimizer if isinstance(optimizer, type) else type(optimizer)
            raise UserError(
                f"optimizer: {kind.__name__} is no name; give a name (adamw, adam, sgd),"
                " and settings as words: 'optim._target_=torch.optim.NAdam', 'optim.weight_decay=0.1'."
            )
        for name, value in others.items():
            hint = did_you_mean(name, ("model", "train", "valid", *(fit.__kwdefaults__ or ())))
            if not hint and isinstance(value, str | int | float):
                word = f'ddptrain.fit(model, train, None, "{name}={value}", ...)'
                hint += f" Keys of the config are words, after the data: {word}"
            raise UserError(f"{name}: is no argument of fit.{hint}")
        check_options(words, "from Python fit takes overrides, --config-dir, --env and --trust")
        objects, of_loaders = objects_of(model, train, valid, loss, metrics, step)
        settings = {**of_loaders, **{key: value for key, value in named.items() if value is not None}}
        typed = set(map(key_of, words))
        overrides = [f"{key}={value}" for key, value in settings.items() if key not in typed]
        packages = trust if isinstance(trust, str) else ",".join(trust)
        trusted = [f"{TRUST}={packages}"] if packages else []
        return objects, [*trusted, "recipe=fit", *overrides, *words]

    if (into := os.environ.get(FIT_INTO)) is not None:
        write_objects(*given(), Path(into))
        raise SystemExit(0)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _as_a_rank(given, ranks)
    objects, overrides = given()
    with tempfile.TemporaryDirectory(prefix="ddptrain-") as folder:
        environment = {OBJECTS: write_objects(objects, overrides, Path(folder))}
        ran = train_in_processes([*_script(), *overrides], 1 if ranks is None else ranks, environment)
    return Run(ran, objects.copied(), own_options(parse(["train", *overrides])))


def _as_a_rank(given: Callable[[], tuple[Objects, list[str]]], ranks: int | None) -> Run:
    """In one of torchrun's processes. Ends it where the training does not come to its end."""
    from ddptrain.config.limits import resolvers_restored  # imports OmegaConf

    runs: list[Run] = []
    script = _script()

    def train(_: Arguments) -> int:
        if ranks not in (None, size := int(os.environ["WORLD_SIZE"])):
            raise UserError(
                f"ranks={ranks}: torchrun has started {size} already (--nproc-per-node). Leave ranks out, or"
                " start the script with python."
            )
        objects, overrides = given()
        give(objects.copied())
        arguments = parse(["train", *overrides])
        known = composed(arguments)
        assert known is not None, "there is no option that asks for something else"
        with recorded():
            folder = run(known[0], [*script, *own_options(arguments), *known[1]])
        runs.append(Run(folder, objects.copied(), own_options(arguments)))
        return ExitCode.DONE

    with restored(), packages_restored(), resolvers_restored(), _main_not_imported(), _job(next(_calls)):
        code = main(["train"], train)
    if code != ExitCode.DONE:
        leave(code)
    return runs[0]


def _script() -> list[str]:
    """So that the run's record repeats it from a shell, where a program calls."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return [] if file is None else [f"{SCRIPT}={os.path.relpath(file)}"]


@contextmanager
def _job(number: int) -> Iterator[None]:
    """Inside, torchrun's job is called otherwise for each call but the first: the folder that a run has by
    default is named by it, so that a restart finds its own. A job without an id, "none", stays so: each of
    its runs gets a new folder."""
    variable = "TORCHELASTIC_RUN_ID"
    name = os.environ[variable]
    os.environ[variable] = name if number == 1 or name == "none" else f"{name}/{number}"
    try:
        yield
    finally:
        os.environ[variable] = name


@contextmanager
def _main_not_imported() -> Iterator[None]:
    """Inside, loader processes do not run the script again, with or without a main guard: multiprocessing
    imports the main module in each by its file."""
    main = sys.modules["__main__"]
    file = vars(main).pop("__file__", None)
    try:
        yield
    finally:
        if file is not None:
            main.__file__ = file
