"""From facts to findings: the rules in their order."""

import dataclasses
from collections.abc import Iterable

from ddptrain.doctor import rules_cuda, rules_gpu, rules_host, rules_presence
from ddptrain.doctor.facts import Facts, Settings
from ddptrain.doctor.findings import LEVELS, Finding, Rule, comma_list, ok, problem, problems
from ddptrain.doctor.probes import collect, of_the_driver, still
from ddptrain.doctor.torch_facts import as_built, ask_gpus

_STAGES: tuple[tuple[Rule, ...], ...] = (
    (rules_presence.wsl, rules_presence.device_nodes),
    (rules_presence.driver_answers,),
    (rules_cuda.build, rules_cuda.visible, rules_gpu.compute_mode),
    (rules_cuda.starts,),
    (rules_cuda.asked_for, rules_gpu.kernels),
    (rules_gpu.cudnn, rules_gpu.memory),
    (
        *(rules_gpu.usable_gpus, rules_presence.nvml_quiet, rules_gpu.silent, rules_gpu.mig, rules_gpu.ranks),
        *(rules_gpu.speed, rules_gpu.nccl),
    ),
)
"""Each follows from those before it: where one has a problem, the later ones would only repeat it. The rules
of one stage are independent. The last one is for GPUs that work."""
_OF_THE_HOST: tuple[Rule, ...] = (
    *(rules_host.torch_imports, rules_host.torchvision, rules_host.cpu, rules_host.cores),
    *(rules_host.shared_memory, rules_host.open_files, rules_host.locked_memory, rules_host.port),
    *(rules_host.settings, rules_host.unanswered),
)
RULES = (rules_presence.no_cuda_here, *(rule for stage in _STAGES for rule in stage), *_OF_THE_HOST)


def examine(facts: Facts) -> list[Finding]:
    """All findings, the problems first; one problem for one cause."""
    gpus = gpu_findings(facts) if facts.settings.device != "cpu" else []
    findings = [*gpus, *_all(_OF_THE_HOST, facts)]
    if not any(finding.id == "torch-import" for finding in findings):
        findings += proof_findings(facts, on_gpu=bool(gpus) and not problems(gpus) and facts.gpu_count > 0)
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def gpu_findings(facts: Facts) -> list[Finding]:
    """As far as the first stage that has a problem."""
    if alien := list(rules_presence.no_cuda_here(facts)):
        return alien
    findings: list[Finding] = []
    for stage in _STAGES:
        findings += _all(stage, facts)
        if problems(findings):
            break
    return findings


def proof_findings(facts: Facts, on_gpu: bool) -> list[Finding]:
    """What was done on the device. A GPU that has a problem already is not blamed twice."""
    proofs = [proof for proof in facts.proofs if on_gpu or proof.device == "cpu"]
    failed = [proof for proof in proofs if not proof.ok and not proof.lacks]
    findings = []
    for device in dict.fromkeys(proof.device for proof in failed):
        results = [
            f"{proof.name} in {proof.dtype}: {proof.said}" for proof in failed if proof.device == device
        ]
        findings.append(_proof_problem(device, results))
    for failure in facts.failures:
        if failure.probe == "proof" and (on_gpu or not facts.gpu_count):
            findings.append(_proof_problem("the device", [failure.why]))
    for device in dict.fromkeys(proof.device for proof in proofs if proof.ok):
        lacks = [proof.dtype for proof in proofs if proof.device == device and proof.lacks]
        without = f"; it has no {comma_list(list(dict.fromkeys(lacks)))}" if lacks else ""
        sound = [proof for proof in proofs if proof.device == device and proof.ok]
        results = [
            f"{dtype} ({', '.join(f'{proof.name}: {proof.said}' for proof in sound if proof.dtype == dtype)})"
            for dtype in dict.fromkeys(proof.dtype for proof in sound)
        ]
        findings.append(ok("computes", f"{device} in {', '.join(results)}{without}"))
    return findings


def _proof_problem(device: str, results: list[str]) -> Finding:
    if all(line.startswith("nms") for line in results):
        return problem(
            "torchvision-no-cuda", results[0],
            f"torchvision has no code for {device}: it is built for the CPU only.",
            "install the two together, from one index: pip install --force-reinstall torch torchvision.",
        )  # fmt: skip
    return problem(
        "computes-wrong", "; ".join(results), f"what {device} computes is wrong, or fails.",
        "run doctor again: the same error each time is the software (pip install --force-reinstall torch"
        " torchvision), another one each time the hardware (nvidia-smi -q -d ECC, sudo dmesg | grep -i"
        " xid; a memory test).",
    )  # fmt: skip


def _all(rules: Iterable[Rule], facts: Facts) -> list[Finding]:
    return [finding for rule in rules for finding in rule(facts)]


def why_no_cuda() -> tuple[str, str]:
    """The cause and the remedy of the first problem, in sentences: for a training, which has no time for all
    questions.

    The driver is asked only where files and variables show no problem: that takes a tenth of a second.
    """
    settings = Settings("cuda")
    torch = as_built()
    first = _first(dataclasses.replace(collect(settings, still()), torch=torch))
    if first is None:
        facts = collect(settings, [*still(), *of_the_driver()])
        first = _first(dataclasses.replace(facts, torch=torch, torch_cuda=ask_gpus()))
    if first is None:
        return "PyTorch counts no CUDA device.", "See what nvidia-smi says."
    return first.cause, f"Remedy: {first.remedy.rstrip('.')}."


def _first(facts: Facts) -> Finding | None:
    return next(iter(problems(gpu_findings(facts))), None)
