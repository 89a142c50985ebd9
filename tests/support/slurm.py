"""A real SLURM on this machine, of Debian's packages: a controller and two nodes on loopback."""

import contextlib
import getpass
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from debian import unpack
from shell import RANK_VARIABLES

SCRIPT = Path(__file__).parents[2] / "launch/slurm.sbatch"
# the last holds the plugins, auth_none among them
_PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins")
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
_CONF = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
# a requeued job waits until its old credentials are void: two minutes by default
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
PluginDir={plugins}
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
# the nodes have the CPUs that stand here, however many the machine has
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Submitted:
    """A job in the queue."""

    cluster: "Cluster"
    number: int
    output: Path

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def told(self) -> dict[str, str]:
        """What scontrol says of it: JobState, Restarts, ExitCode ..."""
        words = self.cluster.call("scontrol", "-o", "show", "job", str(self.number)).split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    def wait(self, timeout: float = 240) -> tuple[str, int]:
        """Its last state, and the exit code of the batch script."""
        deadline = time.monotonic() + timeout
        while (told := self.told())["JobState"] not in _ENDED:
            assert time.monotonic() < deadline, f"{told['JobState']} after {timeout} s:\n{self.text[-3000:]}"
            time.sleep(0.2)
        return told["JobState"], int(told["ExitCode"].partition(":")[0])

    def wait_for(self, text: str, timeout: float = 120) -> None:
        """Until the output holds a text."""
        deadline = time.monotonic() + timeout
        while text not in self.text:
            assert self.told()["JobState"] not in _ENDED, f"no {text!r}:\n{self.text[-3000:]}"
            assert time.monotonic() < deadline, f"no {text!r} after {timeout} s:\n{self.text[-3000:]}"
            time.sleep(0.1)


@dataclass(frozen=True)
class Cluster:
    """Two virtual nodes, n1 and n2, with two CPUs each."""

    folder: Path
    variables: dict[str, str]

    def call(self, *words: str, cwd: Path | None = None, **more: str) -> str:
        ended = subprocess.run(
            words, cwd=cwd, env={**self.variables, **more}, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0, f"{' '.join(words)}: {ended.stderr}"
        return ended.stdout

    def submit(
        self, cwd: Path, options: Sequence[str], arguments: Sequence[str], **variables: str
    ) -> Submitted:
        """`sbatch <options> launch/slurm.sbatch <arguments>`."""
        words = ("sbatch", "--parsable", *options, str(SCRIPT), *arguments)
        number = int(self.call(*words, cwd=cwd, **variables))
        return Submitted(self, number, cwd / f"slurm-{number}.out")


@contextlib.contextmanager
def loopback_cluster(folder: Path) -> Iterator[Cluster]:
    """Bring it up, and end it with all of its jobs. Raises CannotRun."""
    root = unpack(_PACKAGES, folder)
    [plugins] = root.glob("usr/lib/*/slurm-wlm")
    host = socket.gethostname().partition(".")[0]
    conf = _CONF.format(
        host=host, ports=_free_ports(3), plugins=plugins, folder=folder, user=getpass.getuser()
    )
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(conf)
    foreign = (*RANK_VARIABLES, "OMP_NUM_THREADS")
    kept = {
        name: value for name, value in os.environ.items()
        if name not in foreign and not name.startswith(("SLURM", "SBATCH", "SRUN", "PET_"))
    }  # fmt: skip
    variables = {
        **kept,
        "SLURM_CONF": str(folder / "slurm.conf"),
        "LD_LIBRARY_PATH": f"{plugins.parent}:{plugins}",
        "PATH": f"{root}/usr/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
    }
    # Debian's /usr/sbin/slurmd is a link that a package's installation would make
    sbin = f"{root}/usr/sbin"
    node = [f"{sbin}/slurmd-wlm", "-D", "-d", f"{sbin}/slurmstepd-wlm", "-N"]
    cluster = Cluster(folder, variables)
    with contextlib.ExitStack() as daemons:
        for words in ([f"{sbin}/slurmctld-wlm", "-D"], [*node, "n1"], [*node, "n2"]):
            daemons.enter_context(_daemon(words, variables, folder))
        _wait_until_idle(cluster)
        try:
            yield cluster
        finally:
            cluster.call("scancel", "--user", getpass.getuser())
            _wait_until_idle(cluster, 60)  # a step would outlive its slurmd


@contextlib.contextmanager
def _daemon(words: Sequence[str], variables: dict[str, str], folder: Path) -> Iterator[None]:
    with (folder / "daemons.out").open("ab") as said:
        process = subprocess.Popen(words, env=variables, stdout=said, stderr=said)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_idle(cluster: Cluster, timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    states: list[str] = []
    while states != ["idle", "idle"]:
        if time.monotonic() > deadline:
            logs = "\n".join(path.read_text()[-2000:] for path in cluster.folder.glob("*.log"))
            raise AssertionError(f"the nodes are {states} after {timeout} s:\n{logs}")
        time.sleep(0.2)
        with contextlib.suppress(AssertionError):  # the controller does not listen yet
            states = cluster.call("sinfo", "--noheader", "--Node", "--format=%t").split()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
