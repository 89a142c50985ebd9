"""How many cores a job may use."""

import os

from ddptrain.doctor.facts import Limits
from ddptrain.doctor.machine import quota

CORES = "DDPTRAIN_CORES"
"""Environment variable: a sweep tells each of its jobs how many of the machine's cores are its own."""


def cores() -> int:
    """Cores this job may run on: those of its affinity, no more than its container's time is worth."""
    if CORES in os.environ:
        return int(os.environ[CORES])
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Limits(affinity=own, quota=quota()).cores
