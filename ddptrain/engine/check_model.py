"""What a model must be to be trained and saved. Checked before the first step."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from ddptrain.api.strategy import Strategy
from ddptrain.distributed.snapshot import saved_buffers
from ddptrain.engine.plain_state import check_plain
from ddptrain.errors import UserError


def check_model(model: nn.Module, world_size: int = 1) -> None:
    """Raises UserError for lazy parameters, for state that no checkpoint can hold, where nothing is trained,
    and for buffers that several ranks can't exchange."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("model: no parameter requires a gradient, so there is nothing to train.")
    for name, buffer in model.named_buffers() if world_size > 1 else ():
        if buffer.layout != torch.strided:
            raise UserError(
                f"model: buffer {name} is sparse, and several ranks exchange dense ones alone. Use"
                " to_dense(), or one rank."
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise UserError(
                f"model: {name} is lazy: its shape is unknown before a first forward pass. Use a layer with a"
                " given size (nn.Linear for nn.LazyLinear), or run one forward pass in Task.build."
            )
    check_plain({"model": model.state_dict()})


def own_memory(model: nn.Module) -> None:
    """Give buffers of which several numbers lie in one place (``expand``) memory of their own: they are put
    back after passes that must leave no trace."""
    for layer in model.modules():
        for name, buffer in layer._buffers.items():
            if buffer is not None and buffer.layout == torch.strided and 0 in buffer.stride():
                layer._buffers[name] = buffer.contiguous()


Sizes = dict[tuple[nn.Module, str], tuple[torch.Size, torch.dtype] | None]


def buffer_sizes(model: nn.Module) -> Sizes:
    """Shape and dtype of each buffer that a checkpoint holds; None where no pass has made it yet."""
    sizes: Sizes = {(layer, name): None for layer in model.modules() for name in layer._buffers}
    of_buffers = {(layer, name): (b.shape, b.dtype) for layer, name, b in saved_buffers(model.modules())}
    return sizes | of_buffers


def check_buffers(model: nn.Module, before: Sizes) -> None:
    """Raises UserError where a pass has given a buffer another size, or has registered one: a new model
    could not take it from a checkpoint."""
    names = {layer: name for name, layer in model.named_modules()}
    for layer, name, own in saved_buffers(model.modules()):
        known = before.get((layer, name), ())
        if known is not None and known != (own.shape, own.dtype):
            was = f"{tuple(known[0])} of {known[1]} and becomes" if known else "registered there, as"
            raise UserError(
                f"model: buffer {f'{names[layer]}.{name}'.lstrip('.')} is changed by a forward pass (it is"
                f" {was} {tuple(own.shape)} of {own.dtype}), so that no checkpoint of it could be loaded."
                " Register it with its final size, or as None, or with persistent=False if it is a cache."
            )


def sparse_layers(model: nn.Module) -> list[str]:
    """The layers whose gradients are sparse (``nn.Embedding(..., sparse=True)``)."""
    return [name for name, layer in model.named_modules() if getattr(layer, "sparse", False) is True]


def check_sparse(layers: Sequence[str], optimizer: Optimizer, strategy: Strategy) -> None:
    """Raises UserError where ``layers`` have sparse gradients, and optimizer or strategy can't use them."""
    if not layers:
        return
    name = type(optimizer).__name__
    if not isinstance(optimizer, SGD | SparseAdam | Adagrad):
        raise UserError(
            f"optim: {name} takes no sparse gradients, and {layers[0]} of the model has sparse=True. Use"
            " torch.optim.SGD, Adagrad or SparseAdam, or sparse=False."
        )
    if isinstance(optimizer, SparseAdam) and strategy.shards is not None:
        raise UserError(
            "optim: SparseAdam takes sparse gradients alone, and strategy=strict adds up dense ones. Use"
            " torch.optim.Adam, or another strategy."
        )
    if not strategy.takes_sparse_gradients:
        raise UserError(
            f"strategy: {layers[0]} of the model has sparse=True; torch's DDP then averages other layers'"
            " gradients wrongly (seen with 2.11 and 2.15), and FSDP takes none. Use sparse=False, or"
            " strategy=strict with SGD or Adagrad."
        )
