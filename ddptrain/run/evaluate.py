"""The verb ``evaluate``: the metrics of a finished or running run, on all ranks."""

import json
import logging
from pathlib import Path

from ddptrain.config.schema import Config
from ddptrain.distributed.comm import on_all_ranks
from ddptrain.engine.evaluate import OwnBatches, evaluate
from ddptrain.engine.precision import choose_precision
from ddptrain.errors import of_this_rank
from ddptrain.run.agreement import note_other_samples
from ddptrain.run.assemble import eval_batch_size
from ddptrain.run.setup import joined_world, loaded_by_first_rank, make_task, named_checkpoint, trained_model
from ddptrain.text import finite

log = logging.getLogger("ddptrain")


def run(config: Config, folder: Path, checkpoint: str) -> None:
    """Evaluate a checkpoint of the run in ``folder`` under its (perhaps overridden) config.

    checkpoint: as `named_checkpoint` takes it. Prints the metrics as one JSON object on standard output,
    from rank 0.
    """
    task, data = make_task(config)
    with joined_world(config) as (world, reason, watchdog):
        saved = loaded_by_first_rank(world, lambda: named_checkpoint(folder, checkpoint))
        assert saved is not None
        # nodes may have other GPUs
        precision = on_all_ranks(world, lambda: choose_precision(config.precision, world.device))
        model = trained_model(config, task, data, world, saved, needs_data=True)
        on_all_ranks(world, lambda: precision.check(model))
        note_other_samples(data, saved)
        log.info("evaluating %s on %s (%s), %s", saved.path, world.device, reason, precision.name)
        log.info("data       %s", data.describe())
        batches = OwnBatches(data, data.valid_size, eval_batch_size(config), world)
        with of_this_rank():
            report = evaluate(task, model, batches, precision, watchdog)
        if world.is_first:
            step, where = saved.manifest["step"], str(saved.path)
            print(json.dumps(finite({"step": step, "checkpoint": where, **report.metrics})))
