"""The proof that the number of ranks does not change the training."""

from rich.table import Table
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddptrain.config.schema import Config
from ddptrain.config.strategy import is_strict
from ddptrain.engine.freeze import freeze
from ddptrain.engine.parameter_groups import parameter_groups
from ddptrain.errors import UserError
from ddptrain.run.train import drops_out
from ddptrain.text import first_few
from ddptrain.tools.prove.process import Case, ProofResult, Trials
from ddptrain.tools.prove.state_diff import (
    State,
    differences,
    first_line_apart,
    gradients_apart,
    last_state,
    weights_apart,
)

_ROUNDING, _COARSE_ROUNDING = 1e-4, 0.1
"""What is rounding, as `gradients_apart` counts: of fp32, and of anything else."""
_LOSS_ROUNDING = 1e-4


def prove_world(case: Case, ranks: int = 4) -> ProofResult:
    """Any number of ranks trains the same: equal bits with strategy=strict, else equal to rounding, but for
    layers that see one rank's part only."""
    if ranks < 2:
        raise UserError(f"prove world: ranks={ranks}: must be 2 or more.")
    if is_strict(case.config.strategy):
        table = Table("ranks", "largest difference", title="world, strategy=strict")
        broken = _differing_bits(case.trials(ranks), ranks, table)
        summary = f"BROKEN: {broken}" if broken else f"HOLDS: on 1 to {ranks} ranks all bits are equal."
        return ProofResult(not broken, summary, table)
    precision = case.config.precision if case.says("precision") else "fp32"
    is_fine = precision == "fp32" and case.config.strategy.get("compression", "none") == "none"
    tolerance = _ROUNDING if is_fine else _COARSE_ROUNDING
    table = Table("ranks", "largest difference", "weights", "gradients", title=f"world, {precision}")
    trials = case.trials(ranks, f"precision={precision}")
    ours, beyond = _trained(trials, 1), 0
    for size in range(2, ranks + 1):
        theirs = _trained(trials, size)
        apart = max(gradients_apart(ours, theirs).values())
        table.add_row(str(size), _largest(ours, theirs), f"{weights_apart(ours, theirs):.1e}", f"{apart:.1e}")
        beyond = beyond or (size if apart > tolerance else 0)
    if not beyond:
        limit = f"gradients differ by less than {tolerance:.0e} of their norm"
        return ProofResult(True, f"HOLDS: 1 to {ranks} ranks train the same, to rounding ({limit}).", table)
    model = case.make_model()
    layers = _seeing_their_part(model, case.config)
    if not layers:
        return ProofResult(False, f"BROKEN: {_where(trials, model, case.config, beyond, tolerance)}", table)
    differ = f"weights differ, as they have to, by {' and '.join(layers)}"
    broken = _differing_bits(case.strict().trials(ranks), ranks, table)
    if broken:
        return ProofResult(False, f"BROKEN: {differ}, but strategy=strict does not mend it: {broken}", table)
    return ProofResult(True, f"EXPECTED: {differ}; with strategy=strict all bits are equal.", table)


def _trained(trials: Trials, ranks: int, name: str = "on", *more: str) -> State:
    """The last state of a training on so many ranks."""
    return last_state(trials.trained(f"{name}-{ranks}", ranks, *more))


def _differing_bits(trials: Trials, ranks: int, table: Table) -> str:
    """Train under strategy=strict; the first value that is not equal bit for bit, in words, or ''."""
    ours, broken = _trained(trials, 1, "strict"), ""
    for size in range(2, ranks + 1):
        theirs = _trained(trials, size, "strict")
        table.add_row(f"{size}, strict", _largest(ours, theirs))
        if not broken and (differing := differences(ours, theirs)):
            broken = (
                f"on {size} ranks {len(differing)} of {len(ours)} values differ, the first is {differing[0]}."
            )
    return broken


def _largest(ours: State, theirs: State) -> str:
    differing = differences(ours, theirs)
    weights = [difference for difference in differing if difference.name.startswith("model.")]
    return str(max(weights or differing, key=lambda one: one.largest)) if differing else "all bits equal"


def _seeing_their_part(model: nn.Module, config: Config) -> list[str]:
    """The kinds of layers that see one rank's part of a global batch by itself, with names, in words."""
    norms, dropouts = [], []
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and not config.strategy.get("sync_batchnorm"):
            norms.append(name)
        elif drops_out(layer):
            dropouts.append(name)
    kinds = {"BatchNorm": norms, "dropout": dropouts}
    return [f"{kind} in {first_few(names, 3)}" for kind, names in kinds.items() if names]


def _where(trials: Trials, model: nn.Module, config: Config, ranks: int, tolerance: float) -> str:
    """The first layer of the model that parts in the first step, or where the log shows later ones do."""
    ours, theirs = (_trained(trials, size, "one-step", "train.steps=1") for size in (1, ranks))
    apart = [name for name, share in gradients_apart(ours, theirs).items() if share > tolerance]
    if config.thaw is None:
        freeze(model, config.optim, config.freeze)
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [name for parameter, name in names.items() if parameter.requires_grad]
    groups = parameter_groups(model, config.optim, config.train.weight_decay_on)
    # as the optimizer numbers them
    numbered = [names[parameter] for group in groups for parameter in group.parameters]
    parted = {
        numbered[int(name.split(".")[2])] if name.startswith("optimizer.") else name[len("model.") :]
        for name in apart
    }
    for name in order:
        if name in parted:
            count = f"{len(parted)} of {len(order)} parameters"
            return f"on {ranks} ranks the first step has other gradients, from {name} on ({count})."
    line = first_line_apart(trials.folder / "on-1", trials.folder / f"on-{ranks}", _LOSS_ROUNDING)
    later = f"; metrics.jsonl parts at {line}" if line else ""
    return f"on {ranks} ranks the first step is the same, later ones are not{later}."
