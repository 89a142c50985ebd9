"""torch.compile: compiling the model or the loss, the cache, and what is logged about it."""

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._logging._internal import set_logs
from torch.utils._pytree import tree_map_only

from ddptrain.api.observer import End, Evaluated, Observer, Start
from ddptrain.api.recipe import Task
from ddptrain.api.world import World
from ddptrain.errors import UserError

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
WITH_GRAPHS = ("reduce-overhead", "max-autotune")
log = logging.getLogger("ddptrain")


def compile_model(parts: Sequence[nn.Module], mode: str) -> None:
    """Compile a model's parts in place, so that names in checkpoints stay the same; compilation runs in the
    first forward pass."""
    _use_persistent_cache()
    for part in parts:
        part.compile(mode=mode)
        if mode in WITH_GRAPHS:
            part._compiled_call_impl = _copied(part._compiled_call_impl)


def leave_recurrent_layers_eager(model: nn.Module) -> None:
    """In any mode, after the rest was compiled: torch (2.11 to 2.14) fails in an LSTM's backward pass on CPUs
    and in that of each recurrent layer under bf16 on GPUs (pytorch#158007). Its compiler ends a graph at
    these three kinds, and without this would compile what is called there by itself."""
    for layer in model.modules():
        if isinstance(layer, nn.RNN | nn.GRU | nn.LSTM):
            layer._compiled_call_impl = torch.compiler.disable(layer._call_impl)


def compile_loss(task: Task) -> None:
    """Compile the task's loss in place, including the forward pass: one graph, or two under DDP, whose own
    forward is not compiled. Evaluation stays eager."""
    _use_persistent_cache()
    task.loss = torch.compile(task.loss)  # type: ignore[method-assign]


def is_compiled(task: Task, model: nn.Module) -> bool:
    loss_is = hasattr(task.loss, "_torchdynamo_orig_callable")
    return loss_is or any(module._compiled_call_impl is not None for module in model.modules())


def eagerly() -> AbstractContextManager[object]:
    """Inside, compiled code runs eagerly. Does not import torch's compiler if nobody else has."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _use_persistent_cache() -> None:
    """Use ``~/.cache/ddptrain/compiled`` as cache (``XDG_CACHE_HOME``, ``TORCHINDUCTOR_CACHE_DIR``); torch's
    default is a temporary folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ddptrain" / "compiled"
    if not os.environ.get(_FOLDER):
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("%s: can't be made (%s), so the next run compiles again", cache, error.strerror)
        else:
            os.environ[_FOLDER] = str(cache)
    log.info("compiling  before the first step; it may take minutes the first time")


def _copied(call: Any) -> Any:
    """Copy the outputs: a CUDA graph's next run overwrites them (pytorch#170604), and tasks keep some of
    them, for example a recurrent state."""
    return lambda *inputs, **named: tree_map_only(Tensor, Tensor.clone, call(*inputs, **named))


def check_graphs(mode: str, world: World, passes: int) -> None:
    """Raise UserError for CUDA graphs with several backward passes per step: each would overwrite the
    gradients of the previous one (pytorch#96693, #169545)."""
    if mode in WITH_GRAPHS and world.device.type == "cuda" and passes > 1:
        raise UserError(
            f"compile={mode}: in its CUDA graphs each backward pass overwrites the gradients of the one"
            f" before, and here a rank adds up those of {passes} a step. Use compile=default, or one pass a"
            " rank: a larger train.micro_batch, and under strategy=strict as many strategy.shards as ranks."
        )


@final
class Compilations(Observer):
    """Logs how many graphs were compiled, how long that took, and why they were recompiled."""

    def __init__(self) -> None:
        set_logs(recompiles=True)  # torch names the tensor and its sizes each time
        self._reported = 0

    def start(self, event: Start) -> None:
        self._tell("training and evaluation" if event.metrics else "training")

    def evaluated(self, event: Evaluated) -> None:
        self._tell("evaluation, and batches of other sizes")

    def end(self, event: End) -> None:
        self._tell("batches of other sizes")

    def _tell(self, what_for: str) -> None:
        graphs, seconds = _so_far()
        if graphs > self._reported:
            log.info(
                "compiled   %d graph%s for %s; %.1f s so far; kept in %s",
                graphs - self._reported,
                "s" * (graphs - self._reported > 1),
                what_for,
                seconds,
                os.environ.get(_FOLDER, "a temporary folder"),
            )
        self._reported = graphs


def _so_far() -> tuple[int, float]:
    """The number of graphs compiled by this process, and seconds spent."""
    from torch._dynamo import utils

    stats: Any = utils.counters["stats"]
    return stats["unique_graphs"], utils.calculate_time_spent().get("total_wall_time", 0.0)
