"""What a device can do at all, each tried in a fresh process: `python abilities.py <name>` ends with 0 where
it can, else with the reason as its last error.

What a device can't do is left out of the hour, and the report says so in its first lines; no ability is
taken for granted because of the device's name.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor


def computes() -> None:
    """Kernels give numbers, without any help."""
    values = torch.arange(1000, dtype=torch.float32, device="cuda")
    _equal(float(values.sum()), 499500.0, "a sum of 0 to 999")


def graphs() -> None:
    """A captured CUDA graph computes anew when it is replayed."""
    given = torch.full((4,), 2.0, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tripled = given * 3
    given.fill_(5.0)
    graph.replay()
    _equal(float(tripled[0]), 15.0, "3 times 5 in a replayed CUDA graph")


def compiles() -> None:
    """torch.compile makes a Triton kernel, and that computes."""
    from torch._dynamo.utils import counters

    def wave(x: Tensor) -> Tensor:
        return torch.sin(x) * 2 + 1

    given = torch.linspace(0, 1, 1000, device="cuda")
    compiled = torch.compile(wave)(given)
    if not counters["stats"]["unique_graphs"]:
        raise SystemExit("torch.compile has compiled nothing and ran eagerly")
    difference = float((compiled.cpu() - wave(given.cpu())).abs().max())
    if not difference < 1e-5:
        raise SystemExit(f"a compiled function is off by {difference}")


def profiles() -> None:
    """torch's profiler sees kernels on the device."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    square = torch.ones(64, 64, device="cuda")
    with torch.profiler.profile(activities=activities) as profile:
        (square @ square).sum().item()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        kinds = {event.get("cat") for event in json.loads(file.read_text())["traceEvents"]}
    if "kernel" not in kinds:
        raise SystemExit("torch's profiler shows no kernel")


def finds_races() -> None:
    """Run with TORCH_CUDA_SANITIZER=1: torch's sanitizer finds a planted race between two streams."""
    written = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            written.add_(1)
        written.mul_(2)  # not waited for
        torch.cuda.synchronize()
    except Exception as error:
        if "race" in str(error).lower() or "CUDASanitizer" in type(error).__name__:
            return
        raise
    raise SystemExit("torch's CUDA sanitizer has not found a planted race")


def _equal(value: float, expected: float, what: str) -> None:
    if value != expected:
        raise SystemExit(f"{what} is {value}, not {expected}")


ABILITIES = {
    "computes": computes,
    "graphs": graphs,
    "compiles": compiles,
    "profiles": profiles,
    "finds_races": finds_races,
}

if __name__ == "__main__":
    ABILITIES[sys.argv[1]]()
