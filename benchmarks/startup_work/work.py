"""What startup.py has trained, and the notes that the processes leave it; imports no ddptrain."""

import atexit
import json
import os
import re
import time
from pathlib import Path

import torch
from torch import Tensor, nn

NOTES = "STARTUP_NOTES"
"""Environment variable: a folder for the notes. While it holds a file ``hold``, ranks wait after a step."""
STEPS, BATCH, LOG_EVERY = 60, 64, 50


def model() -> nn.Module:
    torch.manual_seed(0)
    hidden = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(128, 10))


def rows() -> tuple[Tensor, Tensor]:
    """Inputs (8192, 64), float32, and labels (8192,)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8192, 64, generator=generator), torch.randint(10, (8192,), generator=generator)


def first_step_is_done() -> None:
    """Note when that was, and at the end of the process how much memory it has taken."""
    folder, rank = Path(os.environ[NOTES]), os.environ.get("RANK", "0")
    first_step = time.time()
    (folder / f"reached-{rank}").touch()
    while (folder / "hold").exists():
        time.sleep(0.01)

    def note() -> None:
        # not getrusage's, which begins with what the process was before its exec
        peak = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        said = {"first_step": first_step, "peak_mb": int(peak[1]) / 1024 if peak else 0.0}
        (folder / f"note-{rank}.json").write_text(json.dumps(said))

    atexit.register(note)
