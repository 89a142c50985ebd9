"""torch.compile: what it made, and where that is kept for the next run."""

import logging
import os
import sys
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
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")
log = logging.getLogger("ddptrain")


def compile_model(model: nn.Module, mode: str) -> None:
    """In place, so that names in checkpoints stay clean; it happens in the first forward pass."""
    _keep_what_is_made()
    model.compile(mode=mode)
    if mode in _WITH_GRAPHS:
        model._compiled_call_impl = _copied(model._compiled_call_impl)


def compile_loss(task: Task) -> None:
    """In place: the task's loss with the forward pass in it, so that both and their backward pass are made as
    one region; under DDP, whose own forward is in no graph, as two. Evaluation stays eager."""
    _keep_what_is_made()
    task.loss = torch.compile(task.loss)  # type: ignore[method-assign]


def is_compiled(task: Task, model: nn.Module) -> bool:
    return model._compiled_call_impl is not None or hasattr(task.loss, "_torchdynamo_orig_callable")


def eagerly() -> AbstractContextManager[object]:
    """Inside, what is compiled runs as it was written. Where nobody has imported torch's compiler nothing is,
    and to ask would import it."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _keep_what_is_made() -> None:
    """In ``~/.cache/ddptrain/compiled`` (``XDG_CACHE_HOME``, ``TORCHINDUCTOR_CACHE_DIR``), where torch by
    itself would lose it with the machine's temporary files."""
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
    """A CUDA graph's outputs are overwritten by its next run (pytorch#170604), and tasks keep some: those of
    several views of a picture, or a state from window to window."""
    return lambda *inputs, **named: tree_map_only(Tensor, Tensor.clone, call(*inputs, **named))


def check_graphs(mode: str, world: World, passes: int) -> None:
    """Refuse CUDA graphs for a rank with several backward passes a step: each would overwrite the gradients
    that the one before has left (pytorch#96693, #169545). Raises UserError."""
    if mode in _WITH_GRAPHS and world.device.type == "cuda" and passes > 1:
        raise UserError(
            f"compile={mode}: in its CUDA graphs each backward pass overwrites the gradients of the one"
            f" before, and here a rank adds up those of {passes} a step. Use compile=default, or one pass a"
            " rank: a larger train.micro_batch, and under elastic=strict as many strategy.shards as ranks."
        )


@final
class Compilations(Observer):
    """Says how many graphs were compiled, how long that took, and why it was done again."""

    def __init__(self) -> None:
        set_logs(recompiles=True)  # torch names the tensor and its sizes each time
        self._told = 0

    def start(self, event: Start) -> None:
        self._tell("training")

    def evaluated(self, event: Evaluated) -> None:
        self._tell("evaluation, and batches of other sizes")

    def end(self, event: End) -> None:
        self._tell("batches of other sizes")

    def _tell(self, what_for: str) -> None:
        graphs, seconds = _so_far()
        if graphs > self._told:
            log.info(
                "compiled   %d graph%s for %s; %.1f s so far; kept in %s",
                graphs - self._told,
                "s" * (graphs - self._told > 1),
                what_for,
                seconds,
                os.environ.get(_FOLDER, "a temporary folder"),
            )
        self._told = graphs


def _so_far() -> tuple[int, float]:
    """Graphs of this process, and the seconds spent on them."""
    from torch._dynamo import utils

    stats: Any = utils.counters["stats"]
    return stats["unique_graphs"], utils.calculate_time_spent().get("total_wall_time", 0.0)
