"""``sweep.on=ray``: each attempt is a detached actor of a Ray cluster, which outlives the sweep."""

import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from ddptrain.config.schema import Config
from ddptrain.distributed.launcher.process import AGENT
from ddptrain.errors import UserError
from ddptrain.tools.sweep.remote import Scheduler

_NAMESPACE = "ddptrain"


@final
class RayCluster(Scheduler):
    """Ray finds the node with the GPUs and cores that a job asks for, and sets CUDA_VISIBLE_DEVICES."""

    name = "ray"

    def __init__(self, config: Config) -> None:
        """Raises UserError where Ray is not installed or no cluster answers."""
        if find_spec("ray") is None:
            raise UserError("sweep.on=ray: needs Ray: pip install 'ddptrain[ray]'")
        import ray

        sweep = config.sweep
        try:
            ray.init(
                address=sweep.address or "auto",
                namespace=_NAMESPACE,
                log_to_driver=False,
                logging_level="ERROR",
                configure_logging=False,
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"sweep.on=ray: no cluster answers ({reason}). Start one (ray start --head), or name its"
                " address: sweep.address=ray://host:10001"
            ) from error
        ranks = int(sweep.gpus_per_job)
        gpus = 0 if config.device == "cpu" else ranks / sweep.jobs_per_gpu
        self.cores: int = sweep.cores_per_job or _cores_beside(gpus, ray.nodes()) or ranks
        self._needs = {"num_gpus": gpus, "num_cpus": self.cores}
        self._ray: Any = ray
        self._actor = ray.remote(_Runner)

    def submit(self, name: str, words: Sequence[str], log: Path) -> None:
        options = {"name": name, "lifetime": "detached", "max_restarts": 0, **self._needs}
        self._actor.options(**options).remote(list(words), os.getcwd(), str(log))

    def names(self) -> set[str] | None:
        try:
            return set(self._ray.util.list_named_actors())
        except self._ray.exceptions.RayError:  # its head is busy, or gone
            return None

    def cancel(self, name: str) -> None:
        try:
            self._ray.kill(self._ray.get_actor(name))
        except ValueError:  # it has ended
            return


def _cores_beside(gpus: float, nodes: Sequence[Mapping[str, Any]]) -> int:
    """Of a job that takes so many GPUs: the same part of a node's cores, of the node with the fewest for each
    GPU. 0 where no node has GPUs."""
    resources = [node["Resources"] for node in nodes if node["Alive"] and node["Resources"].get("GPU")]
    return min((int(each.get("CPU", 0) * gpus / each["GPU"]) for each in resources), default=0)


class _Runner:
    """On a node. The command is an argument of what makes the actor: a call would be lost with a sweep that
    is killed before the actor is there."""

    def __init__(self, words: list[str], folder: str, log: str) -> None:
        threading.Thread(target=self._run, args=(words, folder, log), daemon=True).start()

    def _run(self, words: list[str], folder: str, log: str) -> None:
        with Path(folder, log).open("ab") as output:
            subprocess.run(
                words,
                cwd=folder,
                env={**os.environ, AGENT: str(os.getpid())},  # it ends with the actor
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        import ray

        ray.kill(ray.get_runtime_context().current_actor)
