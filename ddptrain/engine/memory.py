"""The memory of a training step, by part, without having it: the step runs on tensors without numbers."""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import final

import torch
from torch import Tensor, nn

from ddptrain.api.recipe import At, Batch, Task
from ddptrain.data.prefetch import changed
from ddptrain.engine.precision import Precision
from ddptrain.engine.state import TrainState
from ddptrain.errors import UserError
from ddptrain.torch_private import without_numbers


def step_memory(
    model: nn.Module,
    make_state: Callable[[nn.Module], TrainState],
    task: Task,
    batch: Batch,
    precision: Precision,
    device: torch.device,
    passes: int = 1,
    clip_norm: float | None = None,
) -> dict[str, int]:
    """Bytes by part at the peak of a step on the device by one process, as `Strategy.memory` takes them.

    model: with its weights, on the CPU; has none afterwards. batch: a micro-batch, of which a step has so
    many ``passes``. Raises UserError where a step depends on numbers.
    """
    storages = _Storages()
    try:
        with warnings.catch_warnings(action="ignore"), without_numbers(storages.follow):
            _empty(model, device)
            state = make_state(model)
            inputs = changed(batch, lambda tensor: torch.empty_like(tensor, device=device))
            for _ in range(2):  # in the second one the optimizer has its state
                storages.peak = storages.total
                _step(state, task, inputs, precision, passes, clip_norm)
    except ImportError as error:
        raise UserError(f"memory=true: PyTorch {torch.__version__} lacks what it needs ({error}).") from error
    except RuntimeError as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise UserError(
            f"memory=true: this recipe's step can't be followed without its numbers ({reason}). Leave out"
            " what reads them on the host (tensor.item(), nonzero(), masks as indices)."
        ) from error
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    kept = {
        "weights": _size([*model.parameters(), *model.buffers()]),
        "gradients": _size(gradients),
        "optimizer": _size(_tensors(state.optimizer.state.values())),
        "average": _size(_tensors([state.average.state_dict().get("weights", {})])),
    }
    return {**kept, "activations": storages.peak - sum(kept.values())}


def _step(
    state: TrainState, task: Task, batch: Batch, precision: Precision, passes: int, clip_norm: float | None
) -> None:
    """As `TrainStep`: the gradients of the step before are there until the first forward pass is over."""
    for number in range(passes):
        with precision.autocast():
            loss = task.loss(state.wrapped, batch, At(0, 0, 0.0))
        if number == 0:
            state.optimizer.zero_grad(set_to_none=True)
        precision.backward(loss.sum, torch.ones_like(loss.sum))
        del loss
    if clip_norm is not None:
        state.strategy.clip(state.model, clip_norm)
    state.optimizer.step()
    state.average.update()


def _empty(model: nn.Module, device: torch.device) -> None:
    """Put tensors without numbers, on the device, in the place of parameters and buffers."""
    made: dict[Tensor, Tensor] = {}

    def instead(tensor: Tensor) -> Tensor:
        if tensor not in made:
            new = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[tensor] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
        return made[tensor]

    for layer in model.modules():
        own = [*layer.named_parameters(recurse=False, remove_duplicate=False)]
        for name, tensor in [*own, *layer.named_buffers(recurse=False, remove_duplicate=False)]:
            setattr(layer, name, instead(tensor))


@final
class _Storages:
    """The bytes of all storages that are alive, and the most at a time."""

    def __init__(self) -> None:
        self.total = self.peak = 0
        self._alive: set[int] = set()

    def follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) not in self._alive:
            self._alive.add(id(storage))
            self.total += storage.nbytes()
            self.peak = max(self.peak, self.total)
            weakref.finalize(storage, self._end, id(storage), storage.nbytes())

    def _end(self, storage: int, size: int) -> None:
        self._alive.remove(storage)
        self.total -= size


def _size(tensors: Iterable[Tensor]) -> int:
    storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def _tensors(states: Iterable[dict[str, object]]) -> Iterator[Tensor]:
    for state in states:
        yield from (value for value in state.values() if isinstance(value, Tensor))
