"""What every verb that needs the model sets up: world, task, data, model."""

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ddptrain.api.controller import Controller
from ddptrain.api.observer import Observer
from ddptrain.api.recipe import Data, Task
from ddptrain.api.rng import seed_pythons
from ddptrain.api.strategy import Strategy
from ddptrain.api.world import World
from ddptrain.config.instantiate import build, check_node
from ddptrain.config.schema import CAPTURED, COMPILED, Config
from ddptrain.config.strategy import is_ddp, is_fsdp, is_strict
from ddptrain.data.disk import exclusive_lock
from ddptrain.data.generators import restored
from ddptrain.distributed.comm import (
    abandon_group,
    bytes_from_first_rank,
    close_group,
    from_all_ranks,
    on_all_ranks,
    on_first_rank,
    open_group,
)
from ddptrain.distributed.cpu import share_cores
from ddptrain.distributed.device import choose_device
from ddptrain.distributed.watchdog.lost_peer import address_of_peer, from_a_lost_rank
from ddptrain.distributed.watchdog.watchdog import Watchdog
from ddptrain.distributed.world import world_from_environment
from ddptrain.doctor.examine import why_no_cuda
from ddptrain.engine.compiled import Compilations
from ddptrain.engine.early_stop import EarlyStop
from ddptrain.engine.load_model import fit_model
from ddptrain.engine.saved_checkpoint import LoadedCheckpoint, newest_in, read, steps_in, unpack
from ddptrain.engine.step_graph import own_stream
from ddptrain.errors import Diverged, ExitCode, OutOfStep, RankLost, Stopped, UserError, what_ended
from ddptrain.observe.console import open_log
from ddptrain.observe.jsonl import Jsonl
from ddptrain.observe.mirror.observer import Mirror
from ddptrain.observe.summary import Summary
from ddptrain.run.agreement import check_metadata, check_same_data, of_same_kind
from ddptrain.run.device_assert import note_device_assert
from ddptrain.run.optimizer import arguments_of
from ddptrain.run.out_of_memory import lack_of_memory
from ddptrain.run.single_sample import of_a_single_sample

log = logging.getLogger("ddptrain")
Made = TypeVar("Made", Task, Data, Strategy, Observer, Controller)


@contextmanager
def joined_world(config: Config, single: bool = False) -> Iterator[tuple[World, str, Watchdog]]:
    """This rank's world with its device, why that device, and what watches over the rank; the process
    group is open inside.

    single: a world of one, whatever torchrun has started.
    """
    world = World() if single else world_from_environment()
    if config.debug.sync:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # read when CUDA starts
    try:
        device, reason = choose_device(config.device, world, why_no_cuda)
    except UserError as error:
        error.everywhere = not world.is_first_on_node  # nodes differ: the first rank of each prints it
        raise
    world = world.on(device)
    open_log(None, world.is_first)
    strict = is_strict(config.strategy)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = not (config.deterministic or strict)
    world = open_group(world, even_single=not single and is_ddp(config.strategy))
    share_cores(world, strict=strict)
    if world.shares_device:
        reason = f"{reason}; RANKS SHARE A GPU, so their gradients go by way of the host, over gloo"
    watchdog = Watchdog(world, None if single else config.hang_timeout)
    captures = device.type == "cuda" and config.compile in CAPTURED
    with (
        torch_settings(config.deterministic or strict, config.debug.sync),
        watchdog.watching(),
        own_stream(device) if captures else nullcontext(),
    ):
        try:
            yield world, reason, watchdog
        except Stopped:
            try:
                close_group()
            except RuntimeError:  # another rank's grace time has ended first
                abandon_group()
            raise
        except BaseException as error:
            lack = lack_of_memory(error, config, world, watchdog.place)
            known = lack or of_a_single_sample(error, config, world)
            note_device_assert(error)
            _leave_after_error(known or error, world, watchdog)
            if known is not None:
                raise known from None
            raise
        close_group()


@contextmanager
def torch_settings(deterministic: bool, finds_anomalies: bool = False) -> Iterator[None]:
    """Torch's inside, which are afterwards what they were: the process may be a program's own.

    deterministic: only algorithms that give the same bits each time.
    """
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    before = torch.get_deterministic_debug_mode()
    anomalies = torch.autograd.set_detect_anomaly
    with anomalies(True, check_nan=False) if finds_anomalies else nullcontext():  # NaN is the guard's to find
        _repeat_bits(deterministic)
        try:
            yield
        finally:
            _repeat_bits(before > 0, warn_only=before == 1)
            torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


def _repeat_bits(deterministic: bool, warn_only: bool = False) -> None:
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats its bits only so
        # else each new tensor is filled with NaN, for code that reads before it writes: a pass over the
        # memory of most layers (13 % of a MobileNetV3 step on a CPU)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    mode = (1 if warn_only else 2) if deterministic else 0
    if mode != torch.get_deterministic_debug_mode():  # to set it imports torch's compiler
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def _leave_after_error(error: BaseException, world: World, watchdog: Watchdog) -> None:
    """Leave the others after an error. Raises RankLost instead where it only follows from another rank's."""
    agreed = isinstance(error, Diverged | OutOfStep) or (isinstance(error, UserError) and error.everywhere)
    if world.size > 1 and not agreed:
        if from_a_lost_rank(error):
            failure, gone = watchdog.failure_elsewhere(wait=2.0), watchdog.gone()
            abandon_group()
            if failure is not None:
                raise RankLost(failure.said, failure.code, failure.shown) from None
            address = address_of_peer(error) if world.size > world.local_size else ""
            where = f" at {address}" if address else ""
            closed = f"rank {world.rank}: another rank{where} is gone: its connection was closed."
            raise RankLost(gone or closed, ExitCode.CRASH) from None
        code = ExitCode.USER_ERROR if isinstance(error, UserError) else ExitCode.CRASH
        watchdog.failed(code, what_ended(error))
        abandon_group()
        if isinstance(error, UserError) and (first := watchdog.failure_elsewhere(wait=1.0)):
            time.sleep(1.5)  # the first rank to exit makes torchrun end that one, which has to print it
            raise RankLost(first.said, first.code, first.shown) from None  # that rank's message is enough
        time.sleep(1.0)  # the others read of the failure first: this rank may hold the store
        return
    abandon_group()


def make_task(config: Config) -> tuple[Task, Data]:
    """The recipe's two halves, from their config nodes, once all nodes are known to be right."""
    problems = check_node(config.task, "task", offered=("model", "data"))
    if config.model is not None:
        problems += check_node(config.model, "model", offered=None)
    problems += check_node(config.data, "data")
    problems += check_node(arguments_of(config.optim), "optim", offered=("params",))
    _refuse([*problems, *check_node(config.sched, "sched", offered=("optimizer", "steps"))])
    with _one_download_at_a_time() if _downloads(config.data) else nullcontext():
        data = _built(Data, config.data, "data")  # type: ignore[type-abstract]
    model = {} if config.model is None else {"model": partial(build, config.model, "model")}
    task = _built(Task, config.task, "task", **model, data=data)  # type: ignore[type-abstract]
    return task, data


def _downloads(node: Any) -> bool:
    """Whether something that it builds fetches itself, as torchvision's data sets do with download=true."""
    if isinstance(node, Mapping):
        return node.get("download") is True or any(map(_downloads, node.values()))
    return isinstance(node, list) and any(map(_downloads, node))


def _one_download_at_a_time() -> AbstractContextManager[None]:
    """Among a node's processes: torchvision locks nothing, and ranks build their data before they meet."""
    return exclusive_lock(Path(tempfile.gettempdir(), f"ddptrain-{os.getuid()}-downloads.lock"))


def check_extensions(config: Config) -> None:
    """Check the nodes that only training builds: strategy, observers, controllers. All problems at once."""
    problems = check_node(config.strategy, "strategy", offered=("world",))
    gather = config.strategy.get("gather", "fp32")
    if is_fsdp(config.strategy) and gather not in ("fp32", config.precision):
        problems.append(
            f"strategy.gather={gather}: must be fp32, or precision's own ({config.precision}), which it is"
            " where it is left out."
        )
    for group in ("observers", "controllers"):
        for name, node in getattr(config, group).items():
            problems += check_node(node, f"{group}.{name}")
    _refuse(problems)


def _refuse(problems: Sequence[str]) -> None:
    """Raise UserError with each problem once, if there are any."""
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))


def make_observers(config: Config) -> list[Observer]:
    """Those of the config, and the summary, which waits for none of them; where there are any, the mirror and
    what was compiled."""
    observers = [_built(Observer, node, f"observers.{name}") for name, node in config.observers.items()]
    readers = [
        name
        for name, observer in zip(config.observers, observers, strict=True)
        if observer.reads_metrics_file
    ]
    if readers and not any(isinstance(observer, Jsonl) for observer in observers):
        raise UserError(f"observers: {readers[0]} sends metrics.jsonl; add jsonl: [jsonl,{readers[0]}].")
    if config.run.mirror is not None:
        observers.append(Mirror(config.run.mirror))
    return [Summary(), *observers, *([Compilations()] if config.compile in COMPILED else [])]


def make_controllers(config: Config) -> dict[str, Controller]:
    controllers: dict[str, Controller] = {
        name: _built(Controller, node, f"controllers.{name}")  # type: ignore[type-abstract]
        for name, node in config.controllers.items()
    }
    stop = config.stop
    if stop.patience is not None or stop.target is not None:
        if "stop" in controllers:
            raise UserError(
                "controllers.stop: this name is that of stop.patience and stop.target; rename yours."
            )
        controllers["stop"] = EarlyStop(stop.patience, stop.metric, stop.target)
    return controllers


def _built(kind: type[Made], node: Any, key: str, **offered: Any) -> Made:
    result = build(node, key, **offered)
    if not isinstance(result, kind):
        raise UserError(f"{key}._target_={node['_target_']}: must be a ddptrain.api.{kind.__name__}.")
    return result


def make_strategy(node: Mapping[str, Any], world: World, compiled: bool = False) -> Strategy:
    """The strategy of a config's node, for a model that is ``compiled`` or not.

    Raises UserError if it does not fit this world.
    """
    strategy = _built(Strategy, node, "strategy", world=world)  # type: ignore[type-abstract]
    strategy.check(compiled)
    return strategy


def make_model(config: Config, task: Task, device: torch.device) -> nn.Module:
    """The seeded model on its device, in its memory format; not yet compiled or wrapped."""
    return placed(config, seeded_model(config, task), device)


def seeded_model(config: Config, task: Task) -> nn.Module:
    """Where the task makes it."""
    seed_pythons(config.seed)
    torch.manual_seed(config.seed)
    return task.build().train()


def placed(config: Config, model: nn.Module, device: torch.device) -> nn.Module:
    """On its device, in its memory format."""
    model = model.to(device)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)
    return model


def prepare(data: Data, world: World, seed: int) -> None:
    """Open the data on every rank, and make sure that all of them see the same."""
    on_all_ranks(world, lambda: data.prepare(world, seed))
    on_all_ranks(world, lambda: check_metadata(data))
    seen = from_all_ranks(world, (data.identity, data.train_size, data.valid_size))
    for rank, own in enumerate(seen):
        if own != seen[0]:
            sizes, first = (
                f"{train:,} training and {valid:,} validation samples" for _, train, valid in (own, seen[0])
            )
            differs = f"{sizes}, rank 0 {first}"
            if sizes == first:
                differs = "other samples than rank 0, or the same in another order"
            raise UserError(
                f"data: rank {rank} sees {differs}. Every rank needs the same: on each node the same"
                " files (and for the standard library's text the same Python), and a fixed seed for what a"
                " script draws."
            )
    for name, size in (("training", data.train_size), ("validation", data.valid_size)):
        if size < 1:
            raise UserError(
                f"data: the {name} set is empty, and a run needs both: it trains on the one, and is measured"
                " on the other. Give it at least one sample."
            )


def named_checkpoint(folder: Path, name: str) -> LoadedCheckpoint:
    """A checkpoint of the run in ``folder``: ``last``, ``best``, ``step-<n>``, or any by its folder. Empty:
    the best, which the log says, or the last where there is none yet."""
    own = folder / "checkpoints" / (name or "best")
    if not name and own.is_dir():
        saved = read(own)
        best = saved.manifest.get("best", {})
        value = "".join(f", {metric} {best[metric]:.4f}" for metric in best if metric != "step")
        step = saved.manifest["step"]
        log.info("checkpoint %s: step %d%s (the best; checkpoint=last is the newest)", own, step, value)
        return saved
    if name not in ("", "last"):
        if not own.is_dir() and not os.path.lexists(name):
            steps = [path.name for path in steps_in(own.parent)]
            best = ["best"] * (own.parent / "best").is_dir()
            raise UserError(
                f"checkpoint={name}: {folder} has no such checkpoint, and there is no such folder. It has"
                f" {', '.join([*best, *steps]) or 'none yet'}."
            )
        return read(own if own.is_dir() else Path(name), "checkpoint=")
    newest = newest_in(folder / "checkpoints")
    if newest is None:
        raise UserError(f"run={folder}: holds no checkpoint yet.")
    return newest


def loaded_by_first_rank(
    world: World, load: Callable[[], LoadedCheckpoint | None]
) -> LoadedCheckpoint | None:
    """A checkpoint that rank 0 reads, on every rank; its payload goes there in pieces. Collectives."""
    payload: bytes | bytearray = b""

    def without_payload() -> LoadedCheckpoint | None:
        nonlocal payload
        saved = load()
        if saved is not None:
            payload, saved = saved.payload, replace(saved, payload=b"")
        return saved

    saved = on_first_rank(world, without_payload)
    return saved and replace(saved, payload=bytes_from_first_rank(world, payload))


def trained_model(
    config: Config, task: Task, data: Data, world: World, saved: LoadedCheckpoint, needs_data: bool = False
) -> nn.Module:
    """The model with a checkpoint's weights, the averaged ones where there are some.

    What the checkpoint knows of the data is enough where it is all that the data would tell. needs_data: the
    caller needs the data itself.
    """
    state = unpack(saved)
    metadata = saved.manifest.get("recall")
    if metadata and not needs_data:
        with of_same_kind(data, saved):
            data.load_metadata(metadata, world)
    else:
        if metadata:
            with of_same_kind(data, saved):
                data.adopt_metadata(metadata)
        prepare(data, world, config.seed)
        check_same_data(data, saved)
    model = make_model(config, task, world.device)
    fit_model(model, state["average"].get("weights") or state["model"], str(saved.path))
    return model


def loaded_model(
    config: Config, folder: Path, checkpoint: str, device: str
) -> tuple[nn.Module, Task, Data, Path]:
    """For a process that is not ours: a checkpoint's model in evaluation mode, without gradients, its task,
    the data that it knows of, and the checkpoint's folder. device: as the config key. Leaves settings
    and generators as they are."""
    task, data = make_task(config)
    chosen, _ = choose_device(device, World(), why_no_cuda)
    saved = named_checkpoint(folder, checkpoint)
    uses_gpus = chosen.type == "cuda" or torch.cuda.is_initialized()
    gpus = range(torch.cuda.device_count() if uses_gpus else 0)
    with restored(), torch.random.fork_rng(gpus):  # the model is seeded before its weights are replaced
        model = trained_model(config, task, data, World().on(chosen), saved)
    if not torch.cuda.is_initialized():  # the seed that a GPU's generator begins with
        torch.cuda.manual_seed_all(torch.initial_seed())
    return model.eval().requires_grad_(False), task, data, saved.path
