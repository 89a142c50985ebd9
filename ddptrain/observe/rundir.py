"""The run's folder: its name, and the files that describe the run."""

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddptrain.api.world import World
from ddptrain.errors import UserError
from ddptrain.observe.changes import note_changes
from ddptrain.observe.lock import LOCK, lost, unwritable
from ddptrain.observe.mirror.layout import ID
from ddptrain.text import as_yaml, json_object, replace_file
from ddptrain.version import __version__

_LIBRARIES = ("torch", "torchvision", "hydra-core", "omegaconf", "tensorboard", "numpy", "pillow")


_JOB = ".job"
"""The file that keeps which job has begun a run under ``run.resume=never``."""
_JOB_IDS = {"TORCHELASTIC": "TORCHELASTIC_RUN_ID", "SLURM": "SLURM_JOB_ID"}


def name_run(folder: str | None, recipe: str) -> Path:
    """The run's folder: that of ``run.dir``, or ``runs/<recipe>/<time>-<id>``. Called on rank 0 only.

    The id is torchrun's job id if it is set, so a restarted job finds its folder again.
    """
    if folder is not None:
        return Path(folder)
    home = Path("runs") / recipe
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if job == "none":
        return home / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{uuid.uuid4().hex[:6]}"
    job = hashlib.sha256(job.encode()).hexdigest()[:10]
    earlier = sorted(path for path in home.glob("*") if path.name.rpartition("-")[2] == job)
    return earlier[-1] if earlier else home / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{job}"


def open_run(folder: Path) -> None:
    """Make the run's folder. Called on rank 0 only; raises UserError if it can't be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log.txt").touch()
    except OSError as error:
        raise unwritable(folder, error) from error


def note_job(folder: Path) -> None:
    """This job begins the run. Raises UserError if the folder can't be written."""
    try:
        (folder / _JOB).write_text(json.dumps(_own_jobs()))
    except OSError as error:
        raise unwritable(folder, error) from error


def begun_by_this_job(folder: Path) -> bool:
    """Whether an earlier attempt of this job, by torchrun or SLURM, has begun the run."""
    begun = json_object(folder / _JOB)
    restarted = [name for name in _JOB_IDS if os.environ.get(f"{name}_RESTART_COUNT", "0") != "0"]
    # torchrun --standalone has another id after SLURM has requeued it
    told_by = ["SLURM"] if "SLURM" in restarted else list(_JOB_IDS)
    return bool(restarted) and all(begun.get(name) == _own_jobs()[name] for name in told_by)


def _own_jobs() -> dict[str, str]:
    return {name: os.environ.get(variable, "none") for name, variable in _JOB_IDS.items()}


def discard_unused(folder: Path) -> None:
    """Remove the folder of a refused run, if it holds only log and lock."""
    if not folder.is_dir() or lost(folder) is not None:  # somebody has removed it
        return
    left = list(folder.iterdir())
    if {path.name for path in left} <= {"log.txt", LOCK, _JOB, ID}:
        for path in left:
            path.unlink()
        folder.rmdir()


def is_described(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.yaml", "command.txt", "environment.json"))


def describe_run(
    folder: Path, config: Mapping[str, Any], world: World, arguments: Sequence[str], step: int
) -> None:
    """Write the config (a tree), the command and environment, and what of the config is another one from
    ``step`` on, if this goes on with a run. Called after all checks, because the folder may hold a run of
    another config. On rank 0 only; raises UserError if it can't be written, or is not this run's any more."""
    check_kept(folder)
    theirs = {
        name: node
        for name, node in config["controllers"].items()
        if not node["_target_"].startswith("ddptrain.")
    }
    ours = tuple(f"+controllers.{name}=" for name in config["controllers"].keys() - theirs.keys())
    own = [word for word in arguments if not word.startswith(ours)]  # not of sweep or bench
    try:
        tree = {**config, "controllers": theirs}
        kept = note_changes(folder, tree, step)
        replace_file(folder / "config.yaml", as_yaml(dict(kept)))
        replace_file(folder / "command.txt", command_line(world, own) + "\n")
        replace_file(folder / "environment.json", json.dumps(environment(world), indent=2) + "\n")
    except OSError as error:
        raise unwritable(folder, error) from error


def check_kept(folder: Path) -> None:
    """Raise UserError where the run's folder is no longer this run's. On rank 0 only."""
    if (gone := lost(folder)) is not None:
        again = " Start again." if gone.now is None else f" Go on there: run.dir={gone.now}"
        why = f"run.dir={folder}: {gone.why}, under the run that was going on in it."
        raise UserError(f"{why}{again}", everywhere=False)


def command_line(world: World, arguments: Sequence[str]) -> str:
    """The command that repeats the run."""
    launcher = "python"
    if dist.is_torchelastic_launched():
        nodes = world.size // world.local_size
        where = "--standalone" if nodes == 1 else f"--nnodes={nodes}"
        launcher = f"torchrun {where} --nproc-per-node={world.local_size}"
    return " ".join([launcher, "-m ddptrain", *map(shlex.quote, arguments)])


def environment(world: World) -> dict[str, Any]:
    """Versions and hardware: what the run depends on besides its config."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "ddptrain": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "libraries": {name: version for name in _LIBRARIES if (version := _version(name)) is not None},
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "device": str(world.device),
        "world_size": world.size,
        "nodes": world.size // world.local_size,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "git_commit": _git_commit(),
    }


def _version(library: str) -> str | None:
    """Asked for by name: to read about all that is installed takes a quarter of a second."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    try:
        reply = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return reply.stdout.strip()
