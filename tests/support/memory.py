"""What a training step allocates on a CPU, as torch's profiler sees it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function


@dataclass
class Allocated:
    """Bytes that are allocated at each change, counted from the beginning of `allocations`."""

    changes: list[tuple[float, int]] = field(default_factory=list)
    phases: dict[str, tuple[float, float]] = field(default_factory=dict)

    def peak(self, phase: str) -> int:
        begin, end = self.phases[phase]
        before = [total for at, total in self.changes if at <= begin]
        return max([*before[-1:], *(total for at, total in self.changes if begin < at <= end)])


def phase(name: str) -> record_function:
    """A part of what happens inside `allocations`."""
    return record_function(f"phase {name}")


@contextmanager
def allocations(folder: Path) -> Iterator[Allocated]:
    """Records all that torch allocates inside."""
    found = Allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        yield found
    profiled.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    total = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        if event["args"]["Device Type"] == 0:
            total += event["args"]["Bytes"]
            found.changes.append((event["ts"], total))
    for event in events:
        if event.get("ph") == "X" and event["name"].startswith("phase "):
            found.phases[event["name"].removeprefix("phase ")] = (event["ts"], event["ts"] + event["dur"])
