"""One sentence on what limits a run's speed, with the override that would help most."""

from collections.abc import Sequence

from ddptrain.api.observer import RunInfo, Times
from ddptrain.api.timing import PHASES, Timing
from ddptrain.distributed.cpu import cores_of_rank

_THRESHOLDS = {
    "data": 0.15,
    "copy": 0.10,
    "all_reduce": 0.15,
    "optimizer": 0.30,
    "logging": 0.05,
    "evaluating": 0.40,
    "drawing": 0.20,
    "saving": 0.10,
}
"""Fractions of the whole time from which a phase is worth reducing; the rest is the model's work."""
PHASE_NAMES = {
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
"""A rank delays the others if they wait for gradients by this fraction of their time more than it does."""
_TRAFFIC = 1 << 20
"""Bytes of gradients from which compression is worth it; below, latency dominates."""
_LOW_MFU = 0.25


def advise(run: RunInfo, times: Times) -> str:
    """The advice for these times."""
    late = _late_rank(times.ranks)
    timing = times.timing if late is None else times.ranks[late]
    total = sum(timing.seconds.values())
    shares = {phase: timing.seconds[phase] / max(total, 1e-9) for phase in PHASES}
    who = "" if late is None else f"rank {late} delays the others: "
    wastes = {
        phase: shares[phase]
        for phase, least in _THRESHOLDS.items()
        if shares[phase] >= least and (phase != "all_reduce" or late is None)
    }
    if not wastes:
        return who + _on_computing(run, timing, shares, late)
    worst = max(wastes, key=lambda phase: wastes[phase])
    return f"{who}{PHASE_NAMES[worst]} {shares[worst]:.0%} of the run: {_REMEDIES[worst](run)}"


def _late_rank(ranks: Sequence[Timing]) -> int | None:
    """The rank that the others wait for: the one that waits least for gradients itself."""
    if len(ranks) < 2:
        return None
    waits = [rank.shares["all_reduce"] for rank in ranks]
    least = min(range(len(waits)), key=lambda rank: waits[rank])
    others = (sum(waits) - waits[least]) / (len(waits) - 1)
    # if all of them wait long, communication is slow
    return least if others - waits[least] > _LATE and waits[least] < others / 2 else None


def _on_computing(run: RunInfo, timing: Timing, shares: dict[str, float], late: int | None) -> str:
    config, on_gpu = run.config, run.world.device.type == "cuda"
    passes = shares["forward"] + shares["backward"]
    said = f"forward and backward pass {passes:.0%} of the run, as it should be"
    if shares["replay"] > passes:
        said = f"captured steps {shares['replay']:.0%} of the run, as it should be"
    if late is not None:
        return "its forward and backward pass are slower. python -m ddptrain doctor on its host says more"
    if run.convolves and not config["channels_last"]:
        return f"{said}: channels_last=true makes convolutions faster"
    if on_gpu and config["precision"] == "fp32":
        return f"{said}: precision=auto computes in bf16 where the GPU has it"
    if on_gpu and config["compile"] == "off" and not run.further_gpus:
        return f"{said}: compile=default saves launches and memory traffic"
    if on_gpu and timing.mfu is not None and timing.mfu < _LOW_MFU:
        return (
            f"{said}, at {timing.mfu:.0%} of the peak: train.batch_size={2 * config['train']['batch_size']}"
        )
    return f"{said}; python -m ddptrain bench tries what could shorten it"


def _on_data(run: RunInfo) -> str:
    loading, share = run.loading, cores_of_rank(run.world)
    if loading.reading is not None and loading.reading().network > loading.reading().decoding:
        return "the store is too slow, or too far: a larger data.source.cache_gb, or a copy nearby"
    if loading.workers is None:
        if not loading.resident:
            return "let train_batches read ahead, in a thread or a DataLoader's workers"
        if run.world.device.type == "cpu" and share > 1:
            return f"data.resident=false data.workers={share - 1} augments beside the training"
        return "fewer augmentations (data.augment)"
    # more than two per core do not help
    workers = min(max(2 * loading.workers, share), 2 * share)
    remedies = [f"data.workers={workers}"] if workers > loading.workers else []
    remedies += ["data.resident=true"] if run.config["data"].get("resident") is False else []
    return " or ".join(remedies) or "smaller files, a faster disk, or more cores"


def _on_copies(run: RunInfo) -> str:
    return "data.resident=true" if run.loading.resident is False else "smaller batches, for example uint8"


def _on_gradients(run: RunInfo) -> str:
    config = run.config
    compresses = config["strategy"].get("compression") == "none"
    if run.gradient_bytes >= _TRAFFIC and compresses:
        return "strategy.compression=bf16 halves the traffic"
    return f"train.batch_size={2 * config['train']['batch_size']} halves how often"


def _on_optimizer(run: RunInfo) -> str:
    if not run.fused:
        return "an optimizer that torch has fused (optim=adamw, optim=sgd) is one kernel a step"
    return f"train.batch_size={2 * run.config['train']['batch_size']} halves how often"


def _on_log(run: RunInfo) -> str:
    return f"log.every={10 * run.config['log']['every']}"


def _rarer(key: str, every: int | None, run: RunInfo) -> list[str]:
    """Four times less often, if the run is long enough."""
    rarer = min(4 * (every or run.steps_per_epoch), run.steps)
    return [f"{key}={rarer}"] if rarer > (every or run.steps_per_epoch) else []


def _on_evaluating(run: RunInfo) -> str:
    train = run.config["train"]
    remedies = _rarer("train.eval_every", train["eval_every"], run)
    if run.valid_size > train["eval_batch_size"]:
        remedies.append(f"train.eval_batch_size={min(4 * train['eval_batch_size'], run.valid_size)}")
    return ", or ".join(remedies) or "a smaller validation set"


def _on_drawing(run: RunInfo) -> str:
    remedies = _rarer("train.eval_every", run.config["train"]["eval_every"], run)
    remedies += ["~observers.plots"] if "plots" in run.config["observers"] else []
    return ", or ".join(remedies) or "a longer run: its time does not grow with the run's length"


def _on_saving(run: RunInfo) -> str:
    checkpoint = run.config["checkpoint"]
    if not checkpoint["background"]:
        return "checkpoint.background=true writes while it trains"
    return "".join(_rarer("checkpoint.every", checkpoint["every"], run)) or "a faster disk for run.dir"


_REMEDIES = {
    "data": _on_data,
    "copy": _on_copies,
    "all_reduce": _on_gradients,
    "optimizer": _on_optimizer,
    "logging": _on_log,
    "evaluating": _on_evaluating,
    "drawing": _on_drawing,
    "saving": _on_saving,
}
