"""The learning-rate schedule of a config: torch's own."""

import math

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

from ddptrain.config.schema import Sched

_WARMUP_START = 0.01
"""First rate of the warm-up, as a share of the peak."""


def build_schedule(sched: Sched, optimizer: Optimizer, steps: int) -> LRScheduler:
    """The learning rate of each of ``steps`` optimizer steps: a linear warm-up, then ``sched.name``.

    wsd (warm-up, stable, decay): Hu et al. 2024, arXiv:2404.06395, section 4.
    """
    warmup = round(sched.warmup * steps)
    rest = max(1, steps - warmup)
    peaks = [group["lr"] for group in optimizer.param_groups]
    if sched.name == "onecycle":  # has its own warm-up, and varies the momentum inversely
        return OneCycleLR(
            optimizer,
            max_lr=peaks,
            total_steps=steps + 1,  # the rate of the last one would be nearly 0
            pct_start=sched.warmup or 0.3,
            final_div_factor=1 / (25 * sched.final) if sched.final else 1e4,
            cycle_momentum=_has_momentum(optimizer),
        )
    main: LRScheduler
    if sched.name == "cosine" and len(set(peaks)) > 1:  # CosineAnnealingLR has one eta_min for all

        def cosine(step: int) -> float:
            return sched.final + (1 - sched.final) * (1 + math.cos(math.pi * min(step, rest) / rest)) / 2

        main = LambdaLR(optimizer, cosine)
    elif sched.name == "cosine":
        main = CosineAnnealingLR(optimizer, T_max=rest, eta_min=sched.final * peaks[0])
    elif sched.name == "linear":
        main = LinearLR(optimizer, start_factor=1.0, end_factor=sched.final, total_iters=rest)
    elif sched.name == "step":
        milestones = [round(share * steps) - warmup for share in sched.milestones]
        main = MultiStepLR(optimizer, milestones, gamma=sched.gamma)
    else:
        main = ConstantLR(optimizer, factor=1.0)
    parts: list[LRScheduler] = [main]
    switches: list[int] = []
    if sched.name == "wsd" and (cooldown := min(round(sched.cooldown * steps), rest)):
        parts += [LinearLR(optimizer, start_factor=1.0, end_factor=sched.final, total_iters=cooldown)]
        switches += [steps - cooldown]
    if warmup:
        parts = [LinearLR(optimizer, start_factor=_WARMUP_START, total_iters=warmup), *parts]
        switches = [warmup, *switches]
    return SequentialLR(optimizer, parts, switches) if switches else main


def _has_momentum(optimizer: Optimizer) -> bool:
    group = optimizer.param_groups[0]
    return "betas" in group or bool(group.get("momentum"))
