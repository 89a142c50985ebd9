"""Why there is no CUDA, in a few sentences, for a training that has no time for doctor's whole round."""

import dataclasses

from ddptrain.doctor.examine import of_the_gpus
from ddptrain.doctor.facts import Asked, Facts
from ddptrain.doctor.findings import Finding, problems
from ddptrain.doctor.probes import collect, of_the_driver, still
from ddptrain.doctor.torch_facts import as_built, ask_gpus


def why_no_cuda() -> str:
    """The cause and the remedy of the first problem, as sentences.

    The driver is asked only where files and variables show no problem: that takes a tenth of a second.
    """
    asked = Asked("cuda")
    torch = as_built()
    first = _first(dataclasses.replace(collect(asked, still()), torch=torch))
    if first is None:
        facts = collect(asked, [*still(), *of_the_driver()])
        first = _first(dataclasses.replace(facts, torch=torch, torch_cuda=ask_gpus()))
    if first is None:
        return "PyTorch counts no CUDA device."
    return f"{first.cause} {first.remedy[0].upper()}{first.remedy[1:].rstrip('.')}."


def _first(facts: Facts) -> Finding | None:
    return next(iter(problems(list(of_the_gpus(facts)))), None)
