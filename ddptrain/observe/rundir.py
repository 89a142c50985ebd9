"""The run's folder: named once, by rank 0, held by one process, and what describes the run in it."""

import errno
import fcntl
import hashlib
import json
import logging
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from ddptrain import __version__
from ddptrain.config.schema import Config
from ddptrain.distributed.world import World
from ddptrain.errors import UserError

log = logging.getLogger(__name__)

_LIBRARIES = ("torch", "torchvision", "hydra-core", "omegaconf", "tensorboard", "numpy")
_LOCK = ".lock"
_PATIENCE_S = 5.0
"""How long a lock is tried for: rank 0 of a job that is restarted may still be dying."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_held: list[int] = []
"""Open files whose locks this process holds; the system lets go of them when it ends, however it ends."""


def name_run(config: Config) -> Path:
    """The run's folder: ``run.dir``, or ``runs/<recipe>/<time>-<id>``. Called on rank 0 only.

    The id is torchrun's own job id where it has one, so a restarted job finds the folder it had.
    """
    if config.run.dir is not None:
        return Path(config.run.dir)
    home = Path("runs") / config.recipe
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if job == "none":
        return home / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{uuid.uuid4().hex[:6]}"
    job = hashlib.sha256(job.encode()).hexdigest()[:10]
    earlier = sorted(path for path in home.glob("*") if path.name.rpartition("-")[2] == job)
    return earlier[-1] if earlier else home / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{job}"


def open_run(folder: Path) -> None:
    """Make the run's folder. Called on rank 0 only; raises UserError where it can't be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log.txt").touch()
    except OSError as error:
        raise _unwritable(folder, error) from error


def lock_run(folder: Path) -> None:
    """Make this process the only one that writes to the run, for as long as it lives: two would overwrite
    each other's checkpoints. Called on rank 0 only; readers need no lock.

    Raises UserError where another process holds it, or the folder can't be written.
    """
    until = time.monotonic() + _PATIENCE_S
    try:
        while not _lock(folder / _LOCK):
            if time.monotonic() > until:
                raise _in_use(folder, (folder / _LOCK).read_text(errors="replace"))
            time.sleep(0.1)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise _unwritable(folder, error) from error
        why = error.strerror
        log.warning("%s: its file system has no locks (%s); start no second run in there", folder, why)


def _lock(path: Path) -> bool:
    """Take the lock, unless another process has it. It then says whose it is."""
    file, taken = os.open(path, os.O_RDWR | os.O_CREAT, 0o666), False
    try:
        if any(os.path.samestat(os.fstat(file), os.fstat(held)) for held in _held):
            return True
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file), path.stat()):  # else the one before has renamed its folder
            os.ftruncate(file, 0)
            os.write(file, f"{socket.gethostname()} {os.getpid()}".encode())
            _held.append(file)
            taken = True
    except BlockingIOError:
        pass
    finally:
        if not taken:
            os.close(file)
    return taken


def _in_use(folder: Path, holder: str) -> UserError:
    host, _, process = holder.partition(" ")
    who = f"process {process} on {host}" if process else "another process"
    return UserError(
        f"run.dir={folder}: {who} is training in it, and a run has one writer. Stop that one or wait for its"
        " end, or name another folder: run.dir=..."
    )


def _forget_locks() -> None:
    """A lock is held until the last copy of its file is closed: a forked child must not outlive it."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_forget_locks)


def discard_unused(folder: Path) -> None:
    """Remove the folder of a run that was refused before it left anything but its log and its lock."""
    left = list(folder.iterdir())
    if {path.name for path in left} <= {"log.txt", _LOCK}:
        for path in left:
            path.unlink()
        folder.rmdir()


def describe_run(folder: Path, config: Config, world: World, arguments: Sequence[str]) -> None:
    """Write down what the run is: only once it is known to start, for the folder may hold a run that
    this config does not fit. Called on rank 0 only; raises UserError where it can't be written."""
    try:
        (folder / "config.yaml").write_text(yaml.safe_dump(asdict(config), sort_keys=False))
        (folder / "command.txt").write_text(command_line(world, arguments) + "\n")
        (folder / "environment.json").write_text(json.dumps(environment(world), indent=2) + "\n")
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"run.dir={folder}: can't be written ({error.strerror}). Make it writable, or name another"
        " folder: run.dir=..."
    )


def command_line(world: World, arguments: Sequence[str]) -> str:
    """The line that repeats the run."""
    launcher = "python"
    if dist.is_torchelastic_launched():
        nodes = world.size // world.local_size
        where = "--standalone" if nodes == 1 else f"--nnodes={nodes}"
        launcher = f"torchrun {where} --nproc-per-node={world.local_size}"
    return " ".join([launcher, "-m ddptrain", *map(shlex.quote, arguments)])


def environment(world: World) -> dict[str, Any]:
    """What the run depends on besides its config."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "ddptrain": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "libraries": {d.name: d.version for d in metadata.distributions() if d.name in _LIBRARIES},
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "device": str(world.device),
        "world_size": world.size,
        "nodes": world.size // world.local_size,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "git_commit": _git_commit(),
    }


def _git_commit() -> str | None:
    try:
        reply = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return reply.stdout.strip()
