"""What follows from the facts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ddptrain.doctor.facts import Facts

OK, WARNING, PROBLEM = "ok", "warning", "problem"
LEVELS = (PROBLEM, WARNING, OK)


@dataclass(frozen=True)
class Finding:
    id: str
    level: str
    evidence: str
    """What was seen: the values from which the cause follows."""
    cause: str = ""
    """In plain words; '' where all is well."""
    remedy: str = ""
    """A command or a setting; '' where all is well."""
    node: str = ""
    """Whose, where there are several."""


Rule = Callable[[Facts], Iterator[Finding]]
"""Yields nothing where the facts say nothing about it."""


def ok(id: str, evidence: str) -> Finding:
    return Finding(id, OK, evidence)


def warning(id: str, evidence: str, cause: str, remedy: str) -> Finding:
    return Finding(id, WARNING, evidence, cause, remedy)


def problem(id: str, evidence: str, cause: str, remedy: str) -> Finding:
    return Finding(id, PROBLEM, evidence, cause, remedy)


def problems(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == PROBLEM]


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def comma_list(things: "list[str] | tuple[str, ...]") -> str:
    return ", ".join(things) if things else "none"
