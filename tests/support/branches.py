"""Sweeps of the recipe in `branching`, and what their jobs come to."""

from pathlib import Path

from branching.branching import trained_steps as trained_steps
from running import Job
from sweeps import events
from sweeps import start as start_sweep

BRANCHING = Path(__file__).parent / "branching"
WORDS = ["--multirun", f"--config-dir={BRANCHING}", "recipe=branching", "device=cpu", "sweep.dir=sweep"]


def start(cwd: Path, *words: str) -> Job:
    cwd.mkdir(exist_ok=True)
    return start_sweep(cwd, [*WORDS, "sweep.gpus=[0,1]", *words])


def swept(cwd: Path, *words: str) -> Path:
    """The folder of a whole sweep that ends well."""
    job = start(cwd, *words)
    assert job.wait() == 0, job.text
    return cwd


def shared(cwd: Path) -> dict[int, int]:
    """The jobs that went on from another one, and from which step."""
    return {event["job"]: event["step"] for event in events(cwd, "shared")}


def outcomes(cwd: Path) -> dict[str, bytes]:
    """The files of each job's final and best checkpoint, and its metrics, by job and name."""
    found = {}
    for folder in sorted((cwd / "sweep").glob("[0-9]*")):
        steps = list(folder.glob("checkpoints/step-*"))
        last = max(steps, key=lambda path: int(path.name.removeprefix("step-")))
        files = [*last.iterdir(), *(folder / "checkpoints/best").iterdir(), folder / "metrics.jsonl"]
        found |= {str(path.relative_to(cwd / "sweep")): path.read_bytes() for path in files}
    return found
