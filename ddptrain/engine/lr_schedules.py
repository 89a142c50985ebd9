"""Learning-rate schedules for the section ``sched``, of torch's own.

Each is called with the optimizer and the number of steps of the run. All lengths are shares of the run, so
that another number of epochs keeps the shape. warmup: the share in which the rate rises linearly to
``optim.lr``. final: the last rate as a share of that. All raise UserError for a value out of range.
"""

import math
from collections.abc import Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

from ddptrain.errors import UserError

_WARMUP_START = 0.01
"""First rate of the warm-up, as a share of the peak."""


def constant(optimizer: Optimizer, steps: int, warmup: float = 0.0) -> LRScheduler:
    first = _warmup_steps(warmup, steps)
    return _after_warmup(optimizer, first, [ConstantLR(optimizer, factor=1.0)])


def linear(optimizer: Optimizer, steps: int, warmup: float = 0.0, final: float = 0.0) -> LRScheduler:
    first = _warmup_steps(warmup, steps)
    _check_share("final", final)
    return _after_warmup(optimizer, first, [_falling(optimizer, final, max(1, steps - first))])


def cosine(optimizer: Optimizer, steps: int, warmup: float = 0.0, final: float = 0.0) -> LRScheduler:
    first = _warmup_steps(warmup, steps)
    _check_share("final", final)
    rest, peaks = max(1, steps - first), [group["lr"] for group in optimizer.param_groups]

    def factor(step: int) -> float:
        return final + (1 - final) * (1 + math.cos(math.pi * min(step, rest) / rest)) / 2

    main: LRScheduler
    if len(set(peaks)) > 1:  # CosineAnnealingLR has one eta_min for all
        main = LambdaLR(optimizer, factor)
    else:
        main = CosineAnnealingLR(optimizer, T_max=rest, eta_min=final * peaks[0])
    return _after_warmup(optimizer, first, [main])


def step(
    optimizer: Optimizer,
    steps: int,
    warmup: float = 0.0,
    milestones: Sequence[float] = (0.5, 0.75),
    gamma: float = 0.1,
) -> LRScheduler:
    """milestones: shares of the run after which the rate is multiplied by ``gamma``."""
    first = _warmup_steps(warmup, steps)
    if list(milestones) != sorted(milestones) or not all(0 < share < 1 for share in milestones):
        raise UserError(
            f"sched.milestones={list(milestones)}: must rise and lie between 0 and 1 (shares of the run)."
        )
    if not 0 < gamma <= 1:
        raise UserError(f"sched.gamma={gamma:g}: must be above 0 and at most 1.")
    places = [round(share * steps) - first for share in milestones]
    return _after_warmup(optimizer, first, [MultiStepLR(optimizer, places, gamma=gamma)])


def onecycle(optimizer: Optimizer, steps: int, warmup: float = 0.0, final: float = 0.0) -> LRScheduler:
    """torch's, which has its own warm-up (0: its default, 0.3) and varies the momentum inversely."""
    _warmup_steps(warmup, steps)
    _check_share("final", final)
    share = warmup or 0.3
    while share * (steps + 1) == 1:  # torch would divide by a warm-up of no steps
        share = math.nextafter(share, 1.0)
    return OneCycleLR(
        optimizer,
        max_lr=[group["lr"] for group in optimizer.param_groups],
        total_steps=steps + 1,  # the rate of the last one would be nearly 0
        pct_start=share,
        final_div_factor=1 / (25 * final) if final else 1e4,
        cycle_momentum=_has_momentum(optimizer),
    )


def wsd(
    optimizer: Optimizer, steps: int, warmup: float = 0.0, final: float = 0.0, cooldown: float = 0.1
) -> LRScheduler:
    """Warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395, section 4. cooldown: the share, the last one,
    in which the rate falls linearly to ``final``."""
    first = _warmup_steps(warmup, steps)
    _check_share("final", final)
    _check_share("cooldown", cooldown)
    last = min(round(cooldown * steps), max(1, steps - first))
    if not last:
        return constant(optimizer, steps, warmup)
    falling = _falling(optimizer, final, last)
    if first + last >= steps:
        return _after_warmup(optimizer, first, [falling])
    return _after_warmup(optimizer, first, [ConstantLR(optimizer, factor=1.0), falling], [steps - last])


def rising(optimizer: Optimizer, steps: int, lowest: float, highest: float) -> LRScheduler:
    """By equal factors, whatever ``optim.lr`` is: that of ``find lr``."""
    for group in optimizer.param_groups:
        group["lr"] = lowest * group.get("lr_scale", 1.0)
    return LambdaLR(optimizer, lambda step: (highest / lowest) ** (step / max(1, steps - 1)))


def _falling(optimizer: Optimizer, final: float, steps: int) -> LRScheduler:
    return LinearLR(optimizer, start_factor=1.0, end_factor=final, total_iters=steps)


def _after_warmup(
    optimizer: Optimizer, warmup: int, parts: list[LRScheduler], switches: Sequence[int] = ()
) -> LRScheduler:
    """The parts one after the other, from these steps on; before them so many steps of warm-up."""
    if warmup:
        parts = [LinearLR(optimizer, start_factor=_WARMUP_START, total_iters=warmup), *parts]
        switches = [warmup, *switches]
    return SequentialLR(optimizer, parts, list(switches)) if switches else parts[0]


def _warmup_steps(warmup: float, steps: int) -> int:
    if not 0 <= warmup < 1:
        raise UserError(f"sched.warmup={warmup:g}: must be at least 0 and below 1, a share of the run.")
    return round(warmup * steps)


def _check_share(name: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise UserError(f"sched.{name}={share:g}: must be at least 0 and at most 1.")


def _has_momentum(optimizer: Optimizer) -> bool:
    group = optimizer.param_groups[0]
    return "betas" in group or bool(group.get("momentum"))
