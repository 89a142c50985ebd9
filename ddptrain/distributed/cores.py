"""How many cores a job may use."""

import os

CORES = "DDPTRAIN_CORES"
"""Environment variable: a sweep tells each of its jobs how many of the machine's cores are its own."""


def cores() -> int:
    """Cores this job may run on."""
    if CORES in os.environ:
        return int(os.environ[CORES])
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
