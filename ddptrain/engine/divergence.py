"""When a loss or gradient is not finite and ends the run: in which layer, and from which sample, it began."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddptrain.api.recipe import Batch, Progress
from ddptrain.api.sampler import Sampler
from ddptrain.data.prefetch import tensors_of
from ddptrain.engine.compiled import eagerly
from ddptrain.engine.health import numbers_of
from ddptrain.engine.plan import Plan
from ddptrain.engine.step import TrainStep
from ddptrain.errors import Diverged

_INPUT = "the input"


def where_it_began(step: TrainStep, batches: Iterator[Batch], progress: Progress) -> str | None:
    """Run this rank's micro-batches of a step through the bare model again, and name the first number that is
    not finite: a sample's input, else a layer's output, else the loss, else a gradient that a layer returns,
    else a parameter's. None if all are finite on this rank. Does all passes in any case: under a strategy
    that is sharded they are collectives."""
    task, model = step.task, step.state.model
    task.load_rank_state({name: rows.nan_to_num(0, 0, 0) for name, rows in task.rank_state().items()})
    model.zero_grad(set_to_none=True)
    shares = step.sampler.samples(range(progress.step, progress.step + 1), torch.device("cpu"))
    began: str | None = None
    for micro_batch, (samples, _) in zip(step.micro_batches, shares, strict=True):
        batch = next(batches)
        place = _bad_input(batch, len(samples))
        bad_outputs: list[str] = []
        backward = _Backward()
        with ExitStack() as hooks, eagerly():
            for name, layer in model.named_modules():
                if not list(layer.children()):
                    hooks.callback(layer.register_forward_pre_hook(backward.before(name)).remove)
                    hooks.callback(layer.register_forward_hook(backward.after(name)).remove)
                    hooks.callback(layer.register_forward_hook(_noting(bad_outputs, name)).remove)
            loss = step.forward(model, batch, progress, micro_batch)
        loss.sum.backward()
        if began is not None:
            continue
        if place is not None:
            began = f"{_INPUT} of training sample {int(samples[place])}"
        elif bad_outputs:
            began = f"the output of {bad_outputs[0]}"
        elif not bool(torch.isfinite(loss.sum)):
            began = "the loss, though all outputs are finite"
        elif backward.first:
            began = f"the gradient that {backward.first} returns, though the loss is finite"
    if began is not None:
        return began
    bad = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
        and not bool(numbers_of(step.strategy.local(parameter.grad)).isfinite().all())
    ]
    return f"the gradient of {bad[-1]}, though the loss is finite" if bad else None


def _bad_input(batch: Batch, size: int) -> int | None:
    """The row of a batch of ``size`` samples that holds the first number that is not finite."""
    for tensor in tensors_of(batch):
        if tensor.is_floating_point() and tensor.ndim and len(tensor) == size:
            rows = (~tensor.isfinite()).flatten(1).any(dim=1) if tensor.ndim > 1 else ~tensor.isfinite()
            if rows.any():
                return int(rows.nonzero()[0])
    return None


class _Backward:
    """Finds the first layer that receives finite gradients and returns others."""

    def __init__(self) -> None:
        self.first = ""
        self._given_finite: set[str] = set()

    def before(self, name: str) -> Any:
        """A forward pre-hook that checks the gradients of the layer's inputs."""

        def look(layer: nn.Module, inputs: Any) -> None:
            def seen(gradient: Tensor) -> None:
                bad = not bool(gradient.isfinite().all())
                if bad and not self.first and name in self._given_finite:
                    self.first = _named(name, layer)

            for tensor in _floats(inputs):
                if tensor.requires_grad:
                    tensor.register_hook(seen)

        return look

    def after(self, name: str) -> Any:
        """A forward hook that checks the gradients of the layer's outputs."""

        def look(layer: nn.Module, inputs: Any, output: Any) -> None:
            def seen(gradients: tuple[Tensor | None, ...]) -> None:
                if all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None):
                    self._given_finite.add(name)

            for tensor in _floats(output):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(seen)

        return look


class Evidence(NamedTuple):
    """What one rank found in a step with numbers that are not finite."""

    began: str | None
    """Where on this rank, or None."""
    samples: list[int]
    """The training samples of its share."""


def evidence_of(began: str | None, sampler: Sampler, step: int) -> Evidence:
    batches = sampler.samples(range(step, step + 1), torch.device("cpu"))
    return Evidence(began, [int(sample) for ids, _ in batches for sample in ids])


def divergence(
    step: int, skipped: int, ranks: Sequence[Evidence], plan: Plan, compiled: bool, scaled: bool
) -> Diverged:
    """The error that ends the run, from all ranks' evidence. skipped: steps left out in a row, this one
    included. compiled, scaled by fp16's gradient scaler: the step, not its repetition, was."""
    places = [f"rank {rank}: {evidence.began}" for rank, evidence in enumerate(ranks) if evidence.began]
    where = (
        "; ".join(places) or "nowhere when the step is repeated, so in the sum over ranks or in the device"
    )
    diverged = "the training has diverged"
    remedy = "A lower optim.lr, a longer sched.warmup or train.clip_norm=1 usually helps"
    if compiled and not places:
        where = "nowhere when the step is repeated without torch.compile, so most likely in compiled code"
        diverged, remedy = "torch computes other numbers there", "Use compile=off"
    elif scaled and not places:
        where = "nowhere when the step is repeated without fp16's scale, which is halved each time"
        diverged = "the scaled gradients overflow"
        remedy = "A larger train.nonfinite_limit lets the scale fall further; precision=bf16 has none"
    elif any(evidence.began and evidence.began.startswith(_INPUT) for evidence in ranks):
        diverged, remedy = "the data are not finite", "Mend or remove that sample"
    often, advice = "", f"{remedy}; train.nonfinite=skip skips such steps."
    if skipped > plan.nonfinite_limit and (plan.skips_nonfinite or skipped > 1):
        often = f" and {skipped - 1} before it were skipped for the same reason" if skipped > 1 else ""
        advice = f"{remedy}. More in a row than train.nonfinite_limit end the run."
    return Diverged(
        f"step {step + 1} is not finite{often}. First in {where}: {diverged}. {advice}"
        " Checkpoints of earlier steps are kept.",
        {
            "step": step + 1,
            "ranks": [
                {"rank": rank, "first": evidence.began, "samples": evidence.samples}
                for rank, evidence in enumerate(ranks)
            ],
        },
    )


def _noting(bad_outputs: list[str], name: str) -> Any:
    def look(layer: nn.Module, inputs: Any, output: Any) -> None:
        if not bad_outputs and not all(bool(value.isfinite().all()) for value in _floats(output)):
            bad_outputs.append(_named(name, layer))

    return look


def _named(name: str, layer: nn.Module) -> str:
    return f"{name} ({type(layer).__name__})" if name else type(layer).__name__


def _floats(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    values: Sequence[Any] = list(output.values()) if isinstance(output, dict) else []
    if isinstance(output, tuple | list):
        values = output
    return [tensor for value in values for tensor in _floats(value)]
