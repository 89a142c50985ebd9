"""The verb ``predict``: what a trained model answers, on standard output, as it comes."""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from ddptrain.build import typed_arguments
from ddptrain.commands.setup import joined_world, make_task, named_checkpoint, trained_model
from ddptrain.config.schema import Config
from ddptrain.distributed.comm import on_all_ranks
from ddptrain.engine.checkpoint import unpack
from ddptrain.engine.precision import choose_precision
from ddptrain.errors import UserError
from ddptrain.protocols import Task

log = logging.getLogger("ddptrain")


def run(config: Config, folder: Path, checkpoint: str, asked: Mapping[str, str]) -> None:
    """Ask a checkpoint of the run in ``folder``: ``last``, ``best``, or any by its folder.

    asked: the parameters of the task's own `predict`, as typed on the command line. One rank answers.
    """
    task, data = make_task(config)
    if type(task).predict is Task.predict:
        raise UserError(f"predict: {type(task).__name__} offers none.")
    arguments = typed_arguments(task.predict, asked, "predict")
    with joined_world(config) as (world, reason):
        on_all_ranks(world, lambda: data.prepare(world, config.seed))
        if not world.is_first:
            return
        saved = named_checkpoint(folder, checkpoint)
        where = str(saved.path)
        precision = choose_precision(config.precision, world.device)
        log.info("predicting by %s on %s (%s), %s", where, world.device, reason, precision.name)
        model = trained_model(config, task, world.device, unpack(saved.payload, where), where).eval()
        with torch.inference_mode(), precision.autocast():
            for piece in task.predict(model, **arguments):
                # a prompt may hold bytes that are no text
                print(piece.encode(errors="replace").decode(), end="", flush=True)
        print()
