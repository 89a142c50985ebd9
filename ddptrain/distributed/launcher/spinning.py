"""How long OpenMP's threads spin at a barrier before they sleep; to be chosen before torch is imported.

GNU's spin for 3 ms by default: beside other busy processes on the very core that the missing thread waits
for. Without any spinning an idle machine pays for waking its threads. benchmarks/busy.py measures both.
"""

import os
import time
from pathlib import Path

_IDLE, _BUSY = 20_000, 1_000
"""Values of GOMP_SPINCOUNT: about 0.2 ms and 0.01 ms."""
_COMPANY = 0.25
"""Cores' worth of other processes' time from which on the machine counts as busy."""
_TICKS = os.sysconf("SC_CLK_TCK")


def choose_spinning() -> None:
    """Set GOMP_SPINCOUNT by what other processes have taken of this one's cores since this module was
    imported, unless the user has set it or OMP_WAIT_POLICY. It changes no result."""
    if "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ:
        return
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")  # of this node; the others are at work as this one
    starting = int(ranks) - 1 if ranks.isdecimal() else 0
    os.environ["GOMP_SPINCOUNT"] = str(_BUSY if _others() - starting > _COMPANY else _IDLE)


def _others() -> float:
    """Cores' worth of time that others have taken; 0 where the system does not tell."""
    seconds, used, own = (now - then for now, then in zip(_times(), _AT_IMPORT, strict=True))
    return max(0.0, used - own) / seconds if seconds > 0 else 0.0


def _times() -> tuple[float, float, float]:
    """Seconds: by the clock, of all processes on this one's cores, of this one with its children."""
    used = 0
    try:
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        for line in Path("/proc/stat").read_text().splitlines():
            name, *ticks = line.split()
            if name in cores:
                user, nice, system, _, _, *interrupts = map(int, ticks[:8])
                used += user + nice + system + sum(interrupts)
    except (OSError, AttributeError):  # not Linux
        pass
    return time.monotonic(), used / _TICKS, sum(os.times()[:4])


_AT_IMPORT = _times()
