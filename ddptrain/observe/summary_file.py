"""What summary.json and times.json say of a run together. Imports no torch."""

from collections.abc import Mapping
from typing import Any

_LASTING = ("step", "metrics", "best", "higher_is_better")
"""What holds of a summary when another process goes on with the run."""
_SPENT = ("processes", "seconds", "time")
"""What times.json knows of all processes while the last of them trains."""


def current_summary(summary: Mapping[str, Any], times: Mapping[str, Any]) -> dict[str, Any]:
    """The summary, if the last process of the run has written it. Else what lasts of it, and what all
    processes have spent: how the run ended is not known yet, or never will be."""
    if _processes(times) <= _processes(summary):
        return dict(summary)
    lasting = {name: summary[name] for name in _LASTING if name in summary}
    return lasting | {name: times[name] for name in _SPENT if name in times}


def _processes(facts: Mapping[str, Any]) -> int:
    count = facts.get("processes")
    return count if isinstance(count, int) else 0
