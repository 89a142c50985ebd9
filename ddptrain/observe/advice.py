"""What limits a run, in one sentence, with the override that would help most."""

from collections.abc import Sequence
from dataclasses import dataclass

from ddptrain.api.observer import Times
from ddptrain.api.recipe import Loading
from ddptrain.api.timing import PHASES, Timing
from ddptrain.api.world import World
from ddptrain.config.schema import Config
from ddptrain.distributed.cpu import cores

_WORTH_A_WORD = {
    "data": 0.15,
    "copy": 0.10,
    "all_reduce": 0.15,
    "optimizer": 0.30,
    "logging": 0.05,
    "evaluating": 0.40,
    "drawing": 0.20,
    "saving": 0.10,
}
"""Share of the whole time from which on a phase is what to mend; the rest is the model's own work."""
_NAMES = {
    "data": "waiting for data",
    "copy": "waiting for copies to the GPU",
    "all_reduce": "waiting for the other ranks' gradients",
    "optimizer": "the optimizer",
    "logging": "log lines",
    "evaluating": "evaluating",
    "drawing": "drawing figures",
    "saving": "saving checkpoints",
}
_LATE = 0.15
"""A rank holds the others up where they wait for gradients by this share of their time more than it does."""
_TRAFFIC = 1 << 20
"""Bytes of gradients from which on halving them is worth it; below, each message costs what any would."""
_LOW_MFU = 0.25


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run could be told to do otherwise."""

    config: Config
    world: World
    precision: str
    """As chosen: not ``auto``."""
    loading: Loading
    convolves: bool
    """The model has 2-d convolutions."""
    gradient_bytes: int
    fused: bool
    """The optimizer is one kernel a step."""
    steps_per_epoch: int
    steps: int
    """Of the whole run."""
    valid_size: int


def advise(setup: Setup, times: Times) -> str:
    """The verdict on what ``times`` show."""
    late = _late_rank(times.ranks)
    timing = times.timing if late is None else times.ranks[late]
    total = sum(timing.seconds.values())
    shares = {phase: timing.seconds[phase] / max(total, 1e-9) for phase in PHASES}
    who = "" if late is None else f"rank {late} holds the others up: "
    wastes = {
        phase: shares[phase]
        for phase, least in _WORTH_A_WORD.items()
        if shares[phase] >= least and (phase != "all_reduce" or late is None)
    }
    if not wastes:
        return who + _on_computing(setup, timing, shares, late)
    worst = max(wastes, key=lambda phase: wastes[phase])
    return f"{who}{_NAMES[worst]} {shares[worst]:.0%}: {_MENDS[worst](setup)}"


def _late_rank(ranks: Sequence[Timing]) -> int | None:
    """The rank on which the others wait: the one that waits least for gradients itself."""
    if len(ranks) < 2:
        return None
    waits = [rank.shares["all_reduce"] for rank in ranks]
    least = min(range(len(waits)), key=lambda rank: waits[rank])
    others = (sum(waits) - waits[least]) / (len(waits) - 1)
    # where all of them wait long, it is for the messages
    return least if others - waits[least] > _LATE and waits[least] < others / 2 else None


def _on_computing(setup: Setup, timing: Timing, shares: dict[str, float], late: int | None) -> str:
    config, on_gpu = setup.config, setup.world.device.type == "cuda"
    passes = shares["forward"] + shares["backward"]
    said = f"forward and backward pass {passes:.0%}, as it should be"
    if late is not None:
        return "its forward and backward pass are slower. python -m ddptrain doctor on its host says more"
    if setup.convolves and not config.channels_last:
        return f"{said}: channels_last=true makes convolutions faster"
    if on_gpu and config.precision == "fp32":
        return f"{said}: precision=auto computes in bf16 where the GPU has it"
    if on_gpu and config.compile == "off" and config.strategy.name != "dp":
        return f"{said}: compile=default saves launches and memory traffic"
    if on_gpu and timing.mfu is not None and timing.mfu < _LOW_MFU:
        return f"{said}, at {timing.mfu:.0%} of the peak: train.batch_size={2 * config.train.batch_size}"
    return f"{said}; python -m ddptrain bench tries what could shorten it"


def _on_data(setup: Setup) -> str:
    loading, share = setup.loading, max(1, cores() // setup.world.local_size)
    if loading.workers is None:
        if not loading.resident:
            return "let its train_batches read ahead, in a thread or a DataLoader's workers"
        if setup.world.device.type == "cpu" and share > 1:
            return f"data.resident=false data.workers={share - 1} augments beside the training"
        return "fewer augmentations (data.augment)"
    # beyond two for each core they only take turns
    workers = min(max(2 * loading.workers, share), 2 * share)
    mends = [f"data.workers={workers}"] if workers > loading.workers else []
    mends += ["data.resident=true"] if setup.config.data.get("resident") is False else []
    return " or ".join(mends) or "smaller files, a faster disk, or more cores"


def _on_copies(setup: Setup) -> str:
    return "data.resident=true" if setup.loading.resident is False else "send smaller batches: uint8, say"


def _on_gradients(setup: Setup) -> str:
    config = setup.config
    if config.elastic == "strict":
        return "elastic=fast hides it behind the backward pass"
    if setup.gradient_bytes >= _TRAFFIC and config.strategy.compression == "none":
        return "strategy.compression=bf16 halves the traffic"
    return f"train.batch_size={2 * config.train.batch_size} halves how often"


def _on_optimizer(setup: Setup) -> str:
    if not setup.fused:
        return "an optimizer that torch has fused (optim=adamw, optim=sgd) is one kernel a step"
    return f"train.batch_size={2 * setup.config.train.batch_size} halves how often"


def _on_log(setup: Setup) -> str:
    return f"log.every={10 * setup.config.log.every}"


def _rarer(key: str, every: int | None, setup: Setup) -> list[str]:
    """Four times as seldom, as far as the run is long enough."""
    rarer = min(4 * (every or setup.steps_per_epoch), setup.steps)
    return [f"{key}={rarer}"] if rarer > (every or setup.steps_per_epoch) else []


def _on_evaluating(setup: Setup) -> str:
    train = setup.config.train
    mends = _rarer("train.eval_every", train.eval_every, setup)
    if setup.valid_size > train.eval_batch_size:
        mends.append(f"train.eval_batch_size={min(4 * train.eval_batch_size, setup.valid_size)}")
    return ", or ".join(mends) or "a smaller validation set"


def _on_drawing(setup: Setup) -> str:
    mends = _rarer("train.eval_every", setup.config.train.eval_every, setup)
    mends += ["log.tensorboard=false"] if setup.config.log.tensorboard else []
    return ", or ".join(mends) or "a longer run: drawing takes its time once"


def _on_saving(setup: Setup) -> str:
    checkpoint = setup.config.checkpoint
    if not checkpoint.background:
        return "checkpoint.background=true writes while it trains"
    return "".join(_rarer("checkpoint.every", checkpoint.every, setup)) or "a faster disk for run.dir"


_MENDS = {
    "data": _on_data,
    "copy": _on_copies,
    "all_reduce": _on_gradients,
    "optimizer": _on_optimizer,
    "logging": _on_log,
    "evaluating": _on_evaluating,
    "drawing": _on_drawing,
    "saving": _on_saving,
}
