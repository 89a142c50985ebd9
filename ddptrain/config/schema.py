"""The config: one dataclass a section, with the rule of each key beside it.

Imports no torch, so that composing, ``--help`` and a typo's message come at once.
``rule(...)`` metadata is read by `ddptrain.config.check`.
"""

from dataclasses import dataclass, field
from typing import Any

MISSING: Any = "???"
"""OmegaConf's, which takes longer to import than completing a word may."""


COMPILED = ("default", "step", "reduce-overhead", "max-autotune", "step-graph")
"""Values of ``compile`` for which torch's compiler is used."""
CAPTURED = ("graph", "step-graph", "auto")
"""Those for which steps may be captured in a CUDA graph."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value must satisfy; None leaves a bound open."""

    choices: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    words: tuple[str, ...] = ()
    """Of a whole number: what it may be instead."""

    @property
    def bounds(self) -> dict[str, float]:
        """Those that are set, by their names in words: ``at least``."""
        names = ("at_least", "above", "at_most", "below")
        bounds = {name.replace("_", " "): getattr(self, name) for name in names}
        return {name: bound for name, bound in bounds.items() if bound is not None}


def rule(default: Any, **bounds: Any) -> Any:
    """A dataclass field with a default and a `Rule`."""
    return field(default=default, metadata={"rule": Rule(**bounds)})


@dataclass
class Train:
    """How long, and how the global batch is put through the model."""

    batch_size: int = rule(128, at_least=1)
    """Samples of one optimizer step over ALL ranks."""
    micro_batch: Any = rule(None, at_least=1, words=("auto",))
    """Most samples one rank puts through the model at once; null: its whole share; auto: as many as fit. A
    number from the run's start on."""
    epochs: float | None = rule(10.0, above=0)
    steps: int | None = rule(None, at_least=1)
    """Optimizer steps; where given, it decides and ``epochs`` does not."""
    eval_every: int | None = rule(None, at_least=1)
    """Optimizer steps between evaluations; null: at the end of each epoch."""
    eval_batch_size: Any = rule(256, at_least=1, words=("auto",))
    """A number from the run's start on."""
    recompute: list[str] = field(default_factory=list)
    """Patterns of modules' names (``blocks.*``) whose activations are not kept for the backward pass but
    computed again in it: less memory, a longer step, the same numbers."""
    clip_norm: float | None = rule(None, above=0)
    """Largest 2-norm of all gradients together; null: no clipping."""
    weight_decay_on: str = rule("all", choices=("all", "matrices"))
    """Parameters that ``optim.weight_decay`` shrinks: all, or those of two dimensions or more, which
    leaves out biases and norms."""

    nonfinite: str = rule("stop", choices=("stop", "skip"))
    """What a loss or gradient that is not finite, on any rank, does to the step: ends the run (exit code
    4), or leaves the step out. fp16's gradient scaler always leaves out steps that overflow."""
    nonfinite_limit: int = rule(20, at_least=0)
    """Most steps left out in a row; one more ends the run."""
    verify_every: int | None = rule(500, at_least=1)
    """Optimizer steps between comparisons of all ranks' weights (one checksum a parameter); null: never."""
    time_limit: float | None = rule(None, above=0)
    """Seconds after which this process saves and stops with exit code 75, as after SIGTERM."""


@dataclass
class Ema:
    """Exponential moving average of the weights, used for evaluation when on."""

    decay: float | None = rule(None, above=0, below=1)


@dataclass
class Stop:
    """What ends a run before its last step, as done."""

    patience: int | None = rule(None, at_least=1)
    """Evaluations in a row without a better value of ``metric``."""
    metric: str | None = None
    """Of the evaluation; null: the task's best metric."""
    target: float | None = None
    """A value of ``metric`` that is good enough."""


@dataclass
class Init:
    """Weights that a new run starts from. A run that goes on, and every other verb, needs no such file."""

    weights: str | None = None
    """A run's folder, a checkpoint's, a file (.pt, .pth, .safetensors), ``default`` (those of the model's
    library), ``torchvision:<name>``, ``timm:<tag>``, ``hub:<name>``; null: random ones, by ``seed``."""
    skip: list[str] = field(default_factory=list)
    """Patterns of names that are left as they are."""


@dataclass
class Checkpoint:
    every: int | None = rule(None, at_least=1)
    """Optimizer steps between saves; null: at the end of each epoch."""
    keep: int = rule(2, at_least=1)
    background: bool = True
    """Write in a thread while training goes on; the state is copied first. Where memory does not allow the
    copy, a save writes before training goes on."""
    grace: float = rule(25.0, above=0)
    """Seconds from a signal to stop to the process's end; torchrun and Kubernetes kill after 30."""


@dataclass
class LogSection:
    every: int = rule(50, at_least=1)
    """Optimizer steps between log lines; at these the host waits for the device, to read the mean loss."""


@dataclass
class Debug:
    """To look closer. Each of these makes the run slower; none changes what it computes."""

    profile: bool = False
    """Write a trace of a few steps (and on a GPU a snapshot of its memory) to the run's folder."""
    profile_from: int = rule(10, at_least=1)
    """The first of these steps, counted from where this process begins."""
    profile_steps: int = rule(3, at_least=1)
    sync: bool = False
    """The host waits for each CUDA kernel, so that an error is raised where it happens, and an error in
    the backward pass names the line of the forward pass that it belongs to."""


@dataclass
class RunSection:
    dir: str | None = None
    resume: str = "auto"
    """``auto`` continues what ``run.dir`` holds, ``never`` starts anew, or a checkpoint's folder."""
    mirror: str | None = None
    """An address to which checkpoints, config, metrics and log are sent, and from which a run goes on whose
    ``run.dir`` is empty: s3://bucket/folder, gs://, az://, or a folder."""


@dataclass
class Sweep:
    """How the jobs of ``--multirun`` are run. Nothing here changes what a job computes."""

    dir: str | None = None
    """The sweep's folder; null: ``sweeps/<recipe>``. A job that is done there is not run again."""
    on: str = rule("local", choices=("local", "slurm", "ray"))
    """Where its jobs run: on this machine, or on the nodes of a cluster that see the same folders."""
    gpus: Any = "auto"
    """``auto``: all of this machine; or a list of indexes or UUIDs, as CUDA_VISIBLE_DEVICES takes them."""
    gpus_per_job: Any = 1
    """Ranks of a job, each with a GPU of its own; ``all``. Without GPUs: with a share of the cores."""
    jobs_per_gpu: int = rule(1, at_least=1)
    """Jobs of one rank that share a GPU, each with its part of the GPU's memory."""
    cores_per_job: int | None = rule(None, at_least=1)
    """null: its share of this machine's; on a cluster what the scheduler gives."""
    max_parallel: int | None = rule(None, at_least=1)
    """Most jobs at once; null: as many as there are GPUs, or cores, for."""
    timeout: float | None = rule(None, above=0)
    """Seconds a job may run at a stretch before it is stopped and counts as failed."""
    retries: int = rule(0, at_least=0)
    """More attempts for a job that crashed, hung or was killed; each goes on from the last checkpoint."""
    partition: str | None = None
    """slurm, as ``sbatch --partition``."""
    account: str | None = None
    """slurm, as ``sbatch --account``."""
    time: str | None = None
    """slurm, as ``sbatch --time``, of one attempt; a job that reaches it goes on in the next."""
    options: list[str] = field(default_factory=list)
    """slurm: further options of sbatch, ``--constraint=a100``."""
    address: str | None = None
    """ray: the cluster's; null: the one of this machine, or RAY_ADDRESS."""
    dry_run: bool = False
    """Print the plan and start nothing."""
    prune: str = rule("none", choices=("none", "asha", "median"))
    """End jobs early that do worse than others."""
    eta: int = rule(3, at_least=2)
    """asha: one of so many jobs goes on at each rung."""
    rungs: int = rule(2, at_least=1)
    """asha: rungs, at 1/eta of the run, 1/eta^2, ...; before the first one nothing is pruned."""
    search: str = rule("grid", choices=("grid", "tpe", "random", "cmaes"))
    """``grid``: all combinations. Else points of the ranges are drawn one at a time; ``tpe`` and ``cmaes``
    learn from those before."""
    trials: int | None = rule(None, at_least=1)
    """Points that a search tries."""
    seed: int = rule(0, at_least=0)
    """Of what a search draws; jobs have their own."""
    objectives: Any = None
    """``{accuracy:max,samples_per_s:max}``: ``max`` or ``min`` of each of these results; null: the best value
    of the task's best metric."""


@dataclass
class Config:
    """Everything a run follows from."""

    recipe: str = MISSING
    task: dict[str, Any] = MISSING
    model: dict[str, Any] | None = None
    data: dict[str, Any] = MISSING
    augment: dict[str, Any] = field(default_factory=dict)
    """Image classification: a node that takes the place of ``data.augment``; empty once it has."""
    optim: dict[str, Any] = MISSING
    strategy: dict[str, Any] = MISSING
    """How the model is spread over devices: a node, as task and optim are."""
    observers: dict[str, Any] = field(default_factory=dict)
    """Nodes by name: each is told what happens (`ddptrain.api.Observer`)."""
    controllers: dict[str, Any] = field(default_factory=dict)
    """Nodes by name: each may end the run (`ddptrain.api.Controller`)."""
    sched: dict[str, Any] = MISSING
    train: Train = field(default_factory=Train)
    stop: Stop = field(default_factory=Stop)
    ema: Ema = field(default_factory=Ema)
    init: Init = field(default_factory=Init)
    freeze: list[str] = field(default_factory=list)
    """Patterns of parameters' names (``features.*``) that are not trained. BatchNorms of which all are
    frozen keep their statistics, too."""
    thaw: float | None = rule(None, above=0, below=1)
    """The share of the run after which what is frozen is trained, too."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    log: LogSection = field(default_factory=LogSection)
    debug: Debug = field(default_factory=Debug)
    run: RunSection = field(default_factory=RunSection)
    sweep: Sweep = field(default_factory=Sweep)
    seed: int = rule(0, at_least=0, below=2**63)
    device: str = "auto"
    hang_timeout: float | None = rule(300.0, above=0)
    """Seconds in which no rank makes progress before the job is ended and the rank named; null: never.
    Start-up, saving and whatever is done for the first time may take an hour."""
    precision: str = rule("auto", choices=("auto", "fp32", "tf32", "bf16", "fp16"))
    compile: str = rule("off", choices=("off", *dict.fromkeys((*COMPILED, *CAPTURED))))
    """By torch's compiler: the model, in one of its modes; ``step``: the loss together with the model.
    ``graph``: a whole step, captured in a CUDA graph; ``step-graph``: both. ``auto``: a graph, where launches
    limit the steps."""
    channels_last: bool = False
    deterministic: bool = False
    """On a GPU: only algorithms that repeat their bits (slower). On a CPU they always do."""
