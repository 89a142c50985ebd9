"""What the person at the terminal sees."""

import dataclasses
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from ddptrain.doctor.facts import Cluster, DriverGpu, Facts, System, Torch, TorchGpu
from ddptrain.doctor.findings import LEVELS, Finding, gib, problems
from ddptrain.text import counted, print_tables

_READABLE = 110  # Columns of text, on a wider terminal too
_COLOURS = {"problem": "1;31", "warning": "33", "ok": "32"}


def json_of(facts: Facts | Cluster, findings: Sequence[Finding]) -> str:
    """One object, for a report or a program."""
    report: dict[str, Any] = {
        "facts": dataclasses.asdict(facts),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "problems": len(problems(list(findings))),
    }
    return json.dumps(report, indent=2)


def show(device: str, findings: Sequence[Finding]) -> None:
    """The findings, the problems first, and what to do first; ``device``: as `Settings` has it."""
    width = min(_READABLE, shutil.get_terminal_size((_READABLE, 24)).columns)
    for level in LEVELS:
        for finding in [finding for finding in findings if finding.level == level]:
            node = f"{finding.node}: " if finding.node else ""
            _print_paragraph(width, level, f"{finding.id}  {node}{finding.evidence}", _COLOURS[level])
            if finding.cause:
                _print_paragraph(width, "  cause", finding.cause)
                _print_paragraph(width, "  remedy", finding.remedy)
    print(last_word(findings, device))


def header(facts: Facts) -> str:
    """A machine in one line."""
    system, torch, limits = facts.system, facts.torch, facts.limits
    named = [gpu for gpu in facts.driver_gpus if gpu.name]
    listed: Sequence[DriverGpu | TorchGpu] = named or (facts.torch_cuda.gpus if facts.torch_cuda else ())
    gpus = [f"{gpu.name} {gib(gpu.memory)}" for gpu in listed]
    version = facts.driver_version
    parts = [
        f"ddptrain {system.ddptrain} doctor" if system else "ddptrain doctor",
        system.name if system else "",
        f"Python {system.python}" if system else "",
        f"torch {torch.version}" if torch else "torch not importable",
        f"driver {version}" if version else "" if listed else "no NVIDIA driver",
        count_each(gpus) if gpus else "no GPU seen",
        counted(limits.cores, "core") if limits else "",
    ]
    return "  ".join(part for part in parts if part)


def last_word(findings: Sequence[Finding], device: str) -> str:
    """What to do first."""
    wrong = problems(list(findings))
    warnings = [finding for finding in findings if finding.level == "warning"]
    if wrong:
        return f"Do this first ({wrong[0].id}): {wrong[0].remedy}"
    if warnings:
        more = f"{counted(len(warnings), 'warning')}; begin with {warnings[0].id}"
        return f"No problem with device={device}. {more}: {warnings[0].remedy}"
    return f"No problem with device={device}: nothing to do."


def count_each(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def print_cluster(cluster: Cluster, findings: Sequence[Finding]) -> None:
    """A row a node, as wide as the terminal."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for name in (
        "node",
        "python",
        "torch",
        "CUDA",
        "NCCL",
        "driver",
        "GPUs",
        "cores",
        "/dev/shm",
        "problems",
    ):
        table.add_column(name, overflow="fold")
    for node in cluster.nodes:
        system, torch = node.system or System("?", python="?"), node.torch or Torch("?")
        limits = node.limits
        own = [system.name, f"all {len(cluster.nodes)} nodes"]
        wrong = [f.id for f in problems(list(findings)) if f.node in own or system.name in f.node.split(", ")]
        table.add_row(
            system.name,
            system.python,
            torch.version,
            torch.cuda or "none",
            torch.nccl or "none",
            node.driver_version or "none",
            count_each([gpu.name for gpu in node.driver_gpus]) or "none",
            str(limits.cores) if limits else "?",
            gib(limits.shm_total) if limits and limits.shm_total is not None else "none",
            ", ".join(dict.fromkeys(wrong)) or "none",
        )
    print_tables(table)


def _print_paragraph(width: int, label: str, text: str, colour: str = "") -> None:
    """A paragraph beside its label, which is coloured on a terminal only."""
    margin = f"{label:<10}"
    body = textwrap.wrap(text, width - len(margin), break_long_words=False, break_on_hyphens=False)
    coloured = colour and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(f"\033[{colour}m{margin}\033[0m" if coloured else margin, end="")
    print(f"\n{' ' * len(margin)}".join(body))
