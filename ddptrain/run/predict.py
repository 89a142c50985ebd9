"""The verb ``predict``: what a trained model answers, on standard output, as it comes."""

import logging
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from ddptrain.api.recipe import Task
from ddptrain.config.instantiate import typed_arguments
from ddptrain.config.schema import Config
from ddptrain.distributed.world import world_from_environment
from ddptrain.engine.precision import choose_precision
from ddptrain.errors import UserError
from ddptrain.run.setup import joined_world, make_task, named_checkpoint, trained_model

log = logging.getLogger("ddptrain")


def run(config: Config, folder: Path, checkpoint: str, settings: Mapping[str, str]) -> None:
    """Ask a checkpoint of the run in ``folder``, named as `named_checkpoint` takes it.

    settings: the parameters of the task's own `predict`, as typed on the command line. Under torchrun only
    the first rank answers.
    """
    if not world_from_environment().is_first:
        return
    task, data = make_task(config)
    if type(task).predict is Task.predict:
        name = type(task).__name__
        raise UserError(f"predict: {name} has none. In Python ddptrain.load(run).module is the model.")
    arguments = typed_arguments(task.predict, settings, "predict")
    with joined_world(config, single=True) as (world, reason, _):
        saved = named_checkpoint(folder, checkpoint)
        precision = choose_precision(config.precision, world.device)
        model = trained_model(config, task, data, world, saved).eval()
        precision.check(model)
        log.info("predicting by %s on %s (%s), %s", saved.path, world.device, reason, precision.name)
        with torch.inference_mode(), precision.autocast():
            _write(task.predict(model, **arguments))


def _write(pieces: Iterable[str]) -> None:
    """Each piece as it comes, until the reader has enough (``| head``)."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        for piece in pieces:
            print(piece.encode(encoding, errors="replace").decode(encoding), end="", flush=True)
        print(flush=True)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # else the interpreter's last flush fails too
