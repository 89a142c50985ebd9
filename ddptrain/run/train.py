"""The verb ``train``: compose, train, evaluate, summarise."""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ddptrain.api.observer import RunInfo
from ddptrain.api.recipe import Data, Task
from ddptrain.api.world import World
from ddptrain.config.schema import CAPTURED, COMPILED, Config, Debug
from ddptrain.config.strategy import is_dp, is_strict
from ddptrain.distributed.comm import on_all_ranks, on_first_rank
from ddptrain.distributed.cpu import cores_in_words, share_cores
from ddptrain.distributed.watchdog.watchdog import Watchdog
from ddptrain.engine.auto_batch import AutoBatch
from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.compiled import check_graphs, compile_loss
from ddptrain.engine.consistency import check_same_command, check_same_model, check_same_weights
from ddptrain.engine.freeze import Frozen, freeze
from ddptrain.engine.loop import Engine, StepIterator
from ddptrain.engine.plan import Plan
from ddptrain.engine.precision import choose_precision
from ddptrain.engine.recompute import recompute
from ddptrain.engine.saved_checkpoint import LoadedCheckpoint, read, unpack
from ddptrain.engine.step import TrainStep
from ddptrain.engine.step_graph import StepGraph
from ddptrain.errors import Diverged, Stopped, UserError, of_this_rank
from ddptrain.keys import flat_values
from ddptrain.observe.console import open_log
from ddptrain.observe.dispatch import Observers
from ddptrain.observe.gauges import own_gauges
from ddptrain.observe.lock import lock_folder, unlock_folder
from ddptrain.observe.mirror.restore import discard_restored, keep_restored, restore
from ddptrain.observe.monitor import Monitor, extremes
from ddptrain.observe.profile import profiled
from ddptrain.observe.rundir import (
    begun_by_this_job,
    check_kept,
    describe_run,
    discard_unused,
    is_described,
    name_run,
    note_job,
    open_run,
)
from ddptrain.run import setup
from ddptrain.run.agreement import check_same_data, normalise_as_weights, note_other_data
from ddptrain.run.assemble import make_step, plan_run
from ddptrain.run.initial_weights import load_initial_weights
from ddptrain.run.optimizer import arguments_of, check_optimizer
from ddptrain.run.schedule import check_schedule
from ddptrain.run.setup import make_strategy
from ddptrain.run.sharded_model import make_sharded_model
from ddptrain.text import counted, first_few, json_object
from ddptrain.torch_private import spare_dynamo
from ddptrain.version import __version__

log = logging.getLogger("ddptrain")


def run(config: Config, arguments: Sequence[str]) -> Path:
    """Train what the config says, as one rank; returns the run's folder. ``arguments`` are the command line's
    overrides.

    Raises UserError for what the user can mend, Diverged where the loss left the finite numbers.
    """
    spare_dynamo()
    task, data = setup.make_task(config)
    setup.check_extensions(config)
    observers, controllers = setup.make_observers(config), setup.make_controllers(config)
    check_optimizer(config.optim)
    check_schedule(config.sched)
    with setup.joined_world(config) as (world, reason, watchdog):
        watchdog.stop_on_signals(config.checkpoint.grace, config.train.time_limit)
        check_same_command(world, asdict(config))
        folder = on_first_rank(world, lambda: _opened_folder(config))
        open_log(str(folder / "log.txt"), world.is_first)
        log.info("ddptrain %s  recipe %s  run %s", __version__, config.recipe, folder)
        log.info("device     %s (%s)", world.device, reason)
        try:
            gauges, problems = own_gauges(world, spread=is_dp(config.strategy))
            keep, background = config.checkpoint.keep, config.checkpoint.background
            checkpointer = Checkpointer(folder / "checkpoints", keep, background)
            saved = _saved(config, checkpointer, world)
            step = make_train_step(config, task, data, world, watchdog, saved)
            step.state.controllers.update(controllers)
            if saved is not None:
                _resume(saved, step, data, checkpointer)
            if world.is_first:
                keep_restored(folder)
            timing = step.phase.stopwatch.total
            monitor = Monitor(world, gauges, timing=timing, names_slow=_are_comparable(step))
            del saved  # as large as the model with its optimizer's state
            done, steps = step.state.step, step.plan.steps
            log.info("plan       steps %d to %d, %.4g epochs", done, steps, step.plan.epoch(steps))
            finished = on_first_rank(world, lambda: _is_summarised(folder, steps))  # others may not have it
            if done > steps or (done == steps and finished):
                log.info("this run is finished; with more epochs or steps it goes on")
                if config.run.mirror is not None:
                    log.info("mirror     nothing is sent to run.mirror=%s", config.run.mirror)
                on_first_rank(world, lambda: unlock_folder(folder))
                return folder
            on_first_rank(world, lambda: describe_run(folder, asdict(config), world, arguments, done))
        except UserError:
            if world.is_first:
                discard_restored(folder)
                discard_unused(folder)
            raise
        for problem in problems:
            log.info("devices    %s", problem)
        notified = Observers(observers if world.is_first else [])
        engine = Engine(data, step, checkpointer, notified, _graph_maker(config.compile, world))
        profiling = _profiling(config.debug, world, folder / "profile")
        try:
            with monitor.running(), of_this_rank():
                engine.fit(_run(config, folder, data, step, monitor), profiling)
        except Stopped as stopped:
            log.info("%s and saved; start this again with run.dir=%s and it goes on", stopped, folder)
            raise
        except Diverged as diverged:
            if world.is_first:
                evidence = folder / f"nonfinite-step-{diverged.evidence['step']}.json"
                with suppress(OSError, UserError):  # the message is what counts
                    check_kept(folder)
                    evidence.write_text(json.dumps(diverged.evidence) + "\n")
                log.info("evidence   %s (the samples of that step, by rank)", evidence)
            raise
        on_first_rank(world, lambda: _leave_whole(folder, config, world, arguments, done))
        if used := extremes(monitor.summary()):
            log.info("devices    %s", used)
        views = {"plots": f"{folder}/plots", "tensorboard": f"tensorboard --logdir {folder.parent}"}
        if shown := [view for name, view in views.items() if name in config.observers]:
            log.info("look       %s", ", or ".join(shown))
        on_first_rank(world, lambda: unlock_folder(folder))
    return folder


def make_train_step(
    config: Config, task: Task, data: Data, world: World, watchdog: Watchdog, saved: LoadedCheckpoint | None
) -> TrainStep:
    """The train step with all that it is made of, at step 0. saved: will be put into it."""
    # each rank by itself: nodes may have other GPUs, and what one can't do ends all
    strategy = on_all_ranks(world, lambda: make_strategy(config.strategy, world, config.compile in COMPILED))
    precision = on_all_ranks(world, lambda: choose_precision(config.precision, world.device))
    log.info("precision  %s", precision.name)
    ranks, nodes = counted(world.size, "rank"), counted(-(-world.size // world.local_size), "node")
    log.info("strategy   %s, %s on %s", strategy.describe(), ranks, nodes)
    normalise_as_weights(config, data, saved)
    setup.prepare(data, world, config.seed)
    plan = plan_run(config, data, strategy.shards)
    if strategy.sharded:
        plan.check_equal_passes(world)
    # refuses a batch that it can't give, and a file that it can't read
    on_all_ranks(world, lambda: data.train_batches(plan.sampler(world), range(0)))
    log.info("data       %s", data.describe())
    workers = data.loading.workers or 0
    share_cores(world, is_strict(config.strategy), workers)
    log.info("cores      %s", cores_in_words(world, workers))
    _graph_maker(config.compile, world)  # refuses what there is not
    if strategy.sharded:
        model = make_sharded_model(config, task, world)
    else:
        model = setup.make_model(config, task, world.device)
    on_all_ranks(world, lambda: precision.check(model))  # nodes may have other GPUs
    weights = config.init.weights
    if saved is None and weights is not None:
        manifest = load_initial_weights(weights, config.init.skip, config.model or {}, model, world)
        if manifest is not None:
            note_other_data(weights, manifest, data)
    known: Mapping[str, Any] = {} if saved is None else saved.manifest
    frozen = _frozen(config, model, plan, known)
    if names := recompute(model, config.train.recompute):
        log.info("recompute  %s: %s", counted(len(names), "module"), first_few(names, 4))
    with frozen.at_the_end(model) if frozen is not None else nullcontext():
        # before `prepare`: a SyncBatchNorm would wait for ranks that try other sizes
        train = config.train
        trials = AutoBatch(task, model, data, precision, plan, strategy)
        plan = trials.sized(train.micro_batch, train.eval_batch_size, known, watchdog)
        # as found, from here on: the config of the run is written with these
        train.micro_batch, train.eval_batch_size = plan.micro_batch, plan.eval_batch_size
    model = strategy.prepare(model)
    if any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules()):  # ranks meet in each pass
        plan.check_equal_passes(world)
    log.info("model      %s", _model_in_words(model, config))
    check_same_model(world, model)
    sizes = plan.sampler(world).micro_sizes
    log.info("batch      %s", _batch_in_words(plan.batch_size, sizes))
    if (passes := plan.batch_size / data.train_size) > 1:
        message = (
            "note       train.batch_size=%d: a step takes %.3g epochs, for there are %d training samples"
        )
        log.warning(message, plan.batch_size, passes, data.train_size)
    on_all_ranks(world, lambda: check_graphs(config.compile, world, len(sizes)))
    if plan.shards is None:  # shards are the same on any number of ranks
        replicas = world.size * (1 + len(strategy.further_gpus))
        _note_layers_that_see_one_part(model, replicas, len(sizes), config.thaw is not None)
    if config.compile in ("step", "step-graph"):
        compile_loss(task)
    step = make_step(config, task, model, strategy, precision, plan, watchdog, frozen)
    step.state.thawed = bool(known.get("thawed")) or (config.thaw is not None and frozen is None)
    if not strategy.sharded:  # which takes the first rank's weights
        check_same_weights(world, model)
    settings = flat_values(arguments_of(config.optim)).items()
    described = [f"{name} {value}" for name, value in settings if not name.endswith("_target_")]
    log.info("optimizer  %s, %s", type(step.state.optimizer).__name__, ", ".join(described))
    if len(step.state.groups) > 1:
        for group in step.state.groups:
            log.info("group      %s", group)
    return step


def _graph_maker(mode: str, world: World) -> Callable[[TrainStep], StepGraph] | None:
    """Makes what captures a step, for ``compile=mode``. Raises UserError where there are no CUDA graphs."""
    if mode not in CAPTURED:
        return None
    if world.device.type == "cuda":
        return partial(StepGraph, where_launches_limit=mode == "auto")
    if mode == "auto":
        return None
    raise UserError(
        f"compile={mode}: CUDA graphs need a CUDA device; this is {world.device}. Use compile=off."
    )


def _frozen(config: Config, model: nn.Module, plan: Plan, saved: Mapping[str, Any]) -> Frozen | None:
    """What is frozen at the step of a checkpoint's manifest, or at the start, and is now. What a run has
    thawed is not frozen again, should a resume make it longer."""
    until = None if config.thaw is None else math.ceil(config.thaw * plan.steps - 1e-9)
    if until is not None and until >= plan.steps > 1:  # a single step says what the first ones do
        raise UserError(
            f"thaw={config.thaw:g}: comes after the last of {counted(plan.steps, 'step')}, so nothing would"
            " be thawed. Give a smaller one, or leave it out."
        )
    done = plan.steps if saved.get("thawed") else saved.get("step", 0)
    frozen = freeze(model, config.optim, config.freeze, until, done)
    if frozen is not None:
        count = counted(len(frozen.parameters), "tensor")
        ends = "" if until is None else f", until step {until}"
        log.info("frozen     %s%s: %s", count, ends, first_few(frozen.parameters, 4))
    return frozen


def _opened_folder(config: Config) -> Path:
    """The run's folder, locked. Under ``run.resume=never`` what it held is renamed: nothing on disk is
    lost."""
    folder = name_run(config.run.dir, config.recipe)
    anew = config.run.resume == "never"
    if anew and (folder / "checkpoints").is_dir() and not begun_by_this_job(folder):
        old = folder.resolve()
        if Path.cwd().is_relative_to(old):
            raise UserError(
                f"run.resume=never: run.dir={folder} is the current folder or above it, so it can't"
                " be renamed to make place. Start from another folder, or name another run.dir."
            )
        lock_folder(folder)  # no running job's folder is renamed away under it
        try:
            old.rename(old.with_name(f"{old.name}.{time.strftime('%Y-%m-%d_%H-%M-%S')}"))
            old.mkdir()  # run.dir may be a link to it
        except OSError as error:
            raise UserError(
                f"run.resume=never: {folder} holds a run and can't be renamed to make place"
                f" ({error.strerror}). Name another run.dir."
            ) from error
    open_run(folder)
    lock_folder(folder)
    if anew:
        note_job(folder)
    mirror = config.run.mirror
    if mirror is not None and not anew and not (folder / "checkpoints").is_dir():
        restore(mirror, folder)
    return folder


def _leave_whole(folder: Path, config: Config, world: World, arguments: Sequence[str], begun: int) -> None:
    """At the end: put back what describes the run, if somebody has deleted it meanwhile. Raises UserError
    where the folder itself is gone."""
    check_kept(folder)
    if not is_described(folder):
        describe_run(folder, asdict(config), world, arguments, begun)
        log.warning("%s was deleted under the run, and is written anew", folder / "config.yaml")


def _is_summarised(folder: Path, steps: int) -> bool:
    """Whether a run has got beyond its last checkpoint: evaluated and summarised after its last step."""
    summary = json_object(folder / "summary.json")
    return bool(summary.get("outcome") == "done" and summary.get("step", 0) >= steps)


def _saved(config: Config, checkpointer: Checkpointer, world: World) -> LoadedCheckpoint | None:
    """The checkpoint that the run's folder holds or run.resume names, as rank 0 has read and verified it."""

    def load() -> LoadedCheckpoint | None:
        checkpointer.recover()
        saved = checkpointer.newest()
        if saved is None and config.run.resume not in ("auto", "never"):
            saved = read(Path(config.run.resume), "run.resume=")
        return saved

    return setup.loaded_by_first_rank(world, load)


def _resume(saved: LoadedCheckpoint, step: TrainStep, data: Data, checkpointer: Checkpointer) -> None:
    """Put the saved state back, on every rank."""
    where, world = str(saved.path), step.strategy.world
    # of a checkpoint in parts each rank reads its own
    kept = on_all_ranks(world, lambda: unpack(saved, step.strategy.empty))
    step.plan.check_continues(saved.manifest, where)
    check_same_data(data, saved)
    ours = on_first_rank(world, lambda: checkpointer.holds(saved.manifest["step"]))
    step.state.load_state_dict(kept, where, ours)
    best = step.state.best_as(step.task.best_metric)
    if not on_first_rank(world, lambda: checkpointer.restore_best(best)):
        step.state.best = None  # of another run or metric
    state = step.state
    state.metrics, state.metrics_step = saved.manifest["metrics"], saved.manifest["metrics_step"]
    if state.step == step.plan.steps and state.metrics_step != state.step:  # the run was shortened to here
        state.evaluation_due = True
    if world.is_first:
        checkpointer.set_aside_after(step.state.step)
    log.info("resumed    %s", where)


def _run(config: Config, folder: Path, data: Data, step: TrainStep, monitor: Monitor) -> RunInfo:
    state = step.state
    trained = [parameter for parameter in state.model.parameters() if parameter.requires_grad]
    return RunInfo(
        folder,
        asdict(config),
        step.strategy.world,
        step.precision.name,
        data.loading,
        convolves=any(isinstance(layer, nn.Conv2d) for layer in state.model.modules()),
        gradient_bytes=sum(parameter.numel() * parameter.element_size() for parameter in trained),
        fused=bool(state.optimizer.defaults.get("fused")),
        steps_per_epoch=-(-data.train_size // config.train.batch_size),
        steps=step.plan.steps,
        valid_size=data.valid_size,
        further_gpus=len(step.strategy.further_gpus),
        devices=monitor,
    )


def _are_comparable(step: TrainStep) -> bool:
    """Whether ranks' times can be compared: their waits for each other are known, and all have about as many
    samples."""
    size, batch_size = step.strategy.world.size, step.plan.batch_size
    alike = batch_size % size == 0 or batch_size >= 50 * size
    return step.strategy.times_waits and alike


def _profiling(debug: Debug, world: World, folder: Path) -> StepIterator:
    if not debug.profile:
        return iter
    first, count = debug.profile_from, debug.profile_steps
    return partial(profiled, first=first, count=count, world=world, folder=folder)


def _batch_in_words(batch_size: int, sizes: Sequence[int]) -> str:
    """sizes: of this rank's micro-batches."""
    split = f"{batch_size} global, {sum(sizes)} on this rank"
    return f"{split} in {len(sizes)} micro-batches of {max(sizes)}" if len(sizes) > 1 else split


def _model_in_words(model: nn.Module, config: Config) -> str:
    count = sum(p.numel() for p in model.parameters())
    traits = [f"{count:,} parameters"]
    traits += ["channels_last"] if config.channels_last else []
    traits += [f"compiled ({config.compile})"] if config.compile in COMPILED else []
    traits += [f"averaged (decay {config.ema.decay})"] if config.ema.decay is not None else []
    return f"{type(model).__name__}, {', '.join(traits)}"


def _note_layers_that_see_one_part(model: nn.Module, replicas: int, passes: int, thaws: bool) -> None:
    """Log which layers make the training depend on the number of ranks or of micro-batches. passes: of each
    replica in a step. thaws: layers that are frozen now will be trained."""
    parts = replicas * passes
    if parts == 1:
        return
    layers = list(model.modules())
    norms = [layer for layer in layers if isinstance(layer, _BatchNorm) and (layer.training or thaws)]
    seen = passes if all(isinstance(norm, nn.SyncBatchNorm) for norm in norms) else parts
    if norms and seen > 1:
        log.info(
            "note       BatchNorm normalises over each of the %d parts of a global batch by itself, so this"
            " model trains slightly differently on another number of ranks or micro-batches",
            seen,
        )
    if any(map(drops_out, layers)):
        log.info("note       dropout draws another mask on each rank and for each micro-batch")


def drops_out(layer: nn.Module) -> bool:
    """Whether a layer draws masks: nn.LSTM and nn.MultiheadAttention have a share of their own."""
    share = layer.p if isinstance(layer, _DropoutNd) else getattr(layer, "dropout", 0.0)
    return isinstance(share, float) and share > 0
