"""Profiling of a few steps: a trace of all operators, and on a GPU a memory snapshot."""

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ddptrain.api.world import World
from ddptrain.observe.lock import unwritable

log = logging.getLogger("ddptrain")
_MOST_ENTRIES = 200_000
"""Most allocations in a memory snapshot."""


def profiled(steps: range, first: int, count: int, world: World, folder: Path) -> Iterator[int]:
    """The steps, of which ``count`` are recorded, from the ``first`` on (1: the next). Every rank writes its
    own files: ``trace-rank<n>.json.gz`` for Perfetto or chrome://tracing, ``memory-rank<n>.pickle`` for
    PyTorch's memory viewer."""
    begin = steps.start + first - 1
    window = range(begin, begin + count)
    if window.stop > steps.stop:
        log.warning(
            "debug.profile: the run ends before step %d, so nothing is recorded; set profile_from lower",
            window.stop,
        )
        yield from steps
        return
    yield from range(steps.start, window.start)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        refusal = unwritable(folder.parent, error)
        refusal.everywhere = False  # another node may have it
        raise refusal from error
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.memory._record_memory_history(max_entries=_MOST_ENTRIES)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, record_shapes=True, profile_memory=True) as recorded:
        yield from window
        if on_gpu:
            torch.cuda.synchronize(world.device)  # include the last step's kernels in the trace
    trace = folder / f"trace-rank{world.rank}.json.gz"
    recorded.export_chrome_trace(str(trace))
    if on_gpu:
        torch.cuda.memory._dump_snapshot(str(folder / f"memory-rank{world.rank}.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
    log.info("profile    %s (steps %d to %d; open it in Perfetto)", trace, begin + 1, window.stop)
    yield from range(window.stop, steps.stop)
