"""What is not trained: in the whole run, or until a step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddptrain.engine.parameter_groups import matching_parameters
from ddptrain.errors import UserError


@dataclass(frozen=True, slots=True)
class Frozen:
    """Parameters that get no gradient, and BatchNorms that keep their statistics, by name."""

    parameters: tuple[str, ...]
    norms: tuple[str, ...]
    until: int | None
    """The first step that trains them; None: there is none."""

    def freeze(self, model: nn.Module) -> None:
        self._train(model, False)

    def thaw(self, model: nn.Module) -> None:
        self._train(model, True)

    @contextmanager
    def at_the_end(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model is as at the end of the run."""
        if self.until is not None:
            self.thaw(model)
        yield
        self.freeze(model)

    def _train(self, model: nn.Module, trained: bool) -> None:
        for name in self.parameters:
            model.get_parameter(name).requires_grad_(trained)
        for name in self.norms:
            model.get_submodule(name).train(trained)


def freeze(
    model: nn.Module,
    optim: Mapping[str, Any],
    patterns: Sequence[str],
    until: int | None = None,
    done: int = 0,
) -> Frozen | None:
    """Take the parameters that match out of training; returns what is frozen after ``done`` steps, None for
    nothing.

    BatchNorms all of whose parameters match go into evaluation mode, in which their statistics stay as they
    are. Raises UserError where a pattern matches nothing, or all.
    """
    every = dict(model.named_parameters(remove_duplicate=False))
    # what the model itself holds fixed is not thawed
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    frozen_names: set[str] = set()
    for pattern in patterns:
        frozen_names |= matching_parameters(pattern, every, f"freeze={pattern}")
    for group in optim.get("groups") or []:
        if "freeze" in group:
            names = matching_parameters(group["params"], every, f"optim.groups, params: {group['params']}")
            # the last one decides
            frozen_names = frozen_names | names if group["freeze"] else frozen_names - names
    parameters = tuple(name for name in trained if name in frozen_names)
    if not parameters and until is not None:
        raise UserError("thaw: nothing is frozen that could be thawed. Name it, as freeze=[backbone.*] does.")
    if parameters and len(parameters) == len(trained):
        raise UserError("freeze: matches every parameter that is trained, so there is nothing to train.")
    norms = []
    for name, module in model.named_modules():
        own = [f"{name}.{part}" if name else part for part, _ in module.named_parameters(recurse=False)]
        if isinstance(module, _BatchNorm) and own and frozen_names.issuperset(own):
            norms.append(name)
    if not frozen_names or (until is not None and done >= until):
        return None
    frozen = Frozen(parameters, tuple(norms), until)
    frozen.freeze(model)
    return frozen
