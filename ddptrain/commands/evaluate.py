"""The verb ``evaluate``: the metrics of a finished or running run, on all ranks."""

import json
import logging
from pathlib import Path

from ddptrain.commands.setup import (
    check_outputs,
    joined_world,
    make_task,
    named_checkpoint,
    prepare,
    trained_model,
)
from ddptrain.config.schema import Config
from ddptrain.distributed.comm import on_first_rank
from ddptrain.engine.checkpoint import unpack
from ddptrain.engine.evaluate import evaluate
from ddptrain.engine.precision import choose_precision

log = logging.getLogger("ddptrain")


def run(config: Config, folder: Path, checkpoint: str) -> None:
    """Evaluate a checkpoint of the run in ``folder`` under its (perhaps overridden) config.

    checkpoint: ``last``, ``best``, or a checkpoint's folder. Prints the metrics as one JSON object
    on standard output, from rank 0.
    """
    task, data = make_task(config)
    with joined_world(config) as (world, reason, watchdog):
        saved = on_first_rank(world, lambda: named_checkpoint(folder, checkpoint))
        where = str(saved.path)
        state = unpack(saved.payload, where)
        precision = choose_precision(config.precision, world.device)
        log.info("evaluating %s on %s (%s), %s", where, world.device, reason, precision.name)
        prepare(data, world, config.seed)
        check_outputs(data, saved)
        log.info("data       %s", data.describe())
        model = trained_model(config, task, world.device, state, where)
        report = evaluate(task, model, data, world, precision, config.train.eval_batch_size, watchdog)
        if world.is_first:
            print(json.dumps({"step": state["step"], "checkpoint": where, **report.metrics}))
