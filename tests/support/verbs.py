"""The verbs themselves in forked ranks: what a command line does, without the seconds of its imports."""

import multiprocessing
import os
import socket
from typing import Any

import torch

from ddptrain.config.schema import Config
from ddptrain.run import train

_FORK = multiprocessing.get_context("fork")


def train_on(ranks: int, config: Config) -> None:
    """Train as so many processes that torchrun would have started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes: list[Any] = [_FORK.Process(target=_rank, args=(r, ranks, port, config)) for r in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=100)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * ranks, f"exit codes {codes}"


def _rank(rank: int, size: int, port: int, config: Config) -> None:
    torch.set_num_threads(1)  # the parent's thread pool does not survive a fork
    os.environ["OMP_NUM_THREADS"] = "1"
    if size > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    train.run(config, [])
