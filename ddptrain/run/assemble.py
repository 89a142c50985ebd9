"""From a config's values to the engine's parts: the plan, the state at step 0, the step."""

from contextlib import nullcontext

from torch import nn

from ddptrain.api.recipe import Data, Task
from ddptrain.api.sampler import Sampler
from ddptrain.api.strategy import Strategy
from ddptrain.api.world import World
from ddptrain.config.schema import COMPILED, Config, Train
from ddptrain.config.strategy import is_strict
from ddptrain.distributed.watchdog.watchdog import Watchdog
from ddptrain.engine.check_model import check_model, check_sparse, own_memory, sparse_layers
from ddptrain.engine.compiled import compile_model, leave_recurrent_layers_eager
from ddptrain.engine.ema import Average, ExponentialAverage, NoAverage, check_averaged
from ddptrain.engine.freeze import Frozen
from ddptrain.engine.meter import Meter
from ddptrain.engine.parameter_groups import parameter_groups
from ddptrain.engine.phases import Phases
from ddptrain.engine.plan import Plan, steps_of
from ddptrain.engine.precision import Precision
from ddptrain.engine.state import TrainState
from ddptrain.engine.step import TrainStep
from ddptrain.engine.stopwatch import Stopwatch
from ddptrain.errors import UserError
from ddptrain.run.optimizer import build_optimizer
from ddptrain.run.schedule import build_schedule


def samples_of_passes(config: Config, world: World) -> tuple[int, ...]:
    """How many samples each pass of a step has on this rank."""
    train, node = config.train, config.strategy
    shards = node["shards"] if is_strict(node) else None
    return Sampler(1, train.batch_size, 0, world.rank, world.size, _micro_batch(train), shards).micro_sizes


def plan_run(config: Config, data: Data, shards: int | None = None) -> Plan:
    """The plan that a config makes for a data set. shards: `Strategy.shards`."""
    train, train_size = config.train, data.train_size
    steps = train.steps
    if steps is None:
        assert train.epochs is not None  # the config's checks say so
        steps = steps_of(train.epochs, train_size, train.batch_size)
    return Plan(
        steps=steps,
        train_size=train_size,
        batch_size=train.batch_size,
        micro_batch=_micro_batch(train),
        eval_batch_size=Train.eval_batch_size if train.eval_batch_size == "auto" else train.eval_batch_size,
        log_every=config.log.every,
        eval_every=train.eval_every,
        save_every=config.checkpoint.every,
        clip_norm=train.clip_norm,
        seed=config.seed,
        data=data.identity,
        valid_size=data.valid_size,
        shards=shards,
        skips_nonfinite=train.nonfinite == "skip",
        nonfinite_limit=train.nonfinite_limit,
        verify_every=train.verify_every,
        epoch_order=data.epoch_order,
    )


def _micro_batch(train: Train) -> int | None:
    """Before ``auto`` has found one."""
    return None if train.micro_batch == "auto" else train.micro_batch


def eval_batch_size(config: Config) -> int:
    """For a command that does not train. Raises UserError for ``auto``, which a training finds."""
    if config.train.eval_batch_size == "auto":
        raise UserError("train.eval_batch_size=auto: is found by a training; give a number here.")
    return int(config.train.eval_batch_size)


def make_state(
    config: Config,
    model: nn.Module,
    strategy: Strategy,
    precision: Precision,
    steps: int,
    frozen: Frozen | None = None,
) -> TrainState:
    """Step 0 of a run of so many steps: optimizer, schedule and average around a model on its device.

    Compiles and wraps the model. The optimizer has what is frozen, if it is trained later.
    """
    check_model(model, strategy.world.size)
    own_memory(model)
    if config.compile in COMPILED:
        if not config.compile.startswith("step"):
            compile_model(strategy.compiled_parts(model), config.compile)
        leave_recurrent_layers_eager(model)
    wrapped = strategy.wrap(model)
    sparse = sparse_layers(model)
    decays_on = config.train.weight_decay_on
    with frozen.at_the_end(model) if frozen is not None else nullcontext():
        optimizer = build_optimizer(config.optim, model, decays_on, bool(sparse), strategy.sharded)
        groups = tuple(map(str, parameter_groups(model, config.optim, decays_on)))
        precision.check_gradients(model)
        if config.ema.decay is not None:
            check_averaged(model)
    check_sparse(sparse, optimizer, strategy)
    average: Average = NoAverage()
    if config.ema.decay is not None:
        average = ExponentialAverage(model, config.ema.decay, strategy)
    return TrainState(
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        schedule=build_schedule(config.sched, optimizer, steps),
        scaler=precision.scaler,
        average=average,
        meter=Meter(strategy.world, strategy.shards),
        strategy=strategy,
        groups=groups,
        frozen=frozen,
    )


def make_step(
    config: Config,
    task: Task,
    model: nn.Module,
    strategy: Strategy,
    precision: Precision,
    plan: Plan,
    watchdog: Watchdog,
    frozen: Frozen | None = None,
) -> TrainStep:
    """The step of a run, with its state at step 0 around a model on its device."""
    state = make_state(config, model, strategy, precision, plan.steps, frozen)
    phases = Phases(watchdog, Stopwatch(strategy.world.device))
    return TrainStep(task, precision, plan, state, phases)
