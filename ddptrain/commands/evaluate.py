"""The verb ``evaluate``: the metrics of a finished or running run, on all ranks."""

import json
import logging
from pathlib import Path

from ddptrain.commands.setup import joined_world, make_model, make_task
from ddptrain.config.schema import Config
from ddptrain.distributed.comm import on_all_ranks, on_first_rank
from ddptrain.engine.checkpoint import Checkpointer, Saved, read, unpack
from ddptrain.engine.evaluate import evaluate
from ddptrain.engine.precision import choose_precision
from ddptrain.engine.state import fit_model
from ddptrain.errors import UserError

log = logging.getLogger("ddptrain")


def run(config: Config, folder: Path, checkpoint: str) -> None:
    """Evaluate a checkpoint of the run in ``folder`` under its (perhaps overridden) config.

    checkpoint: ``last``, ``best``, or a checkpoint's folder. Prints the metrics as one JSON object
    on standard output, from rank 0.
    """
    task, data = make_task(config)
    with joined_world(config) as (world, reason):
        saved = on_first_rank(world, lambda: _read(folder, checkpoint))
        where = str(saved.path)
        state = unpack(saved.payload, where)
        precision = choose_precision(config.precision, world.device)
        log.info("evaluating %s on %s (%s), %s", where, world.device, reason, precision.name)
        on_all_ranks(world, lambda: data.prepare(world, config.seed))
        log.info("data       %s", data.describe())
        model = make_model(config, task, world.device)
        fit_model(model, state["average"].get("weights") or state["model"], where)
        report = evaluate(task, model, data, world, precision, config.train.eval_batch_size)
        if world.is_first:
            print(json.dumps({"step": state["step"], "checkpoint": where, **report.metrics}))


def _read(folder: Path, checkpoint: str) -> Saved:
    if checkpoint == "best":
        return read(folder / "checkpoints" / "best")
    if checkpoint != "last":
        return read(Path(checkpoint))
    saved = Checkpointer(folder / "checkpoints", keep=1).newest()
    if saved is None:
        raise UserError(f"run={folder}: holds no checkpoint yet.")
    return saved
