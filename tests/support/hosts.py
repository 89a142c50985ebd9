"""Real hosts on one machine: network namespaces with a name each, joined by veth pairs over a switch.

A host is a network namespace with the address 10.77.0.<number>, and in it every command has a host name of
its own (a UTS namespace) and a hosts file by which the hosts find each other. The disk is shared, as a
cluster's file system is. The switch is a bridge in a namespace too, so that a link is cut where nobody on a
host sees more than an unplugged cable.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from shell import RANK_VARIABLES

ROOT = Path(__file__).parents[2]
SLOW_LINK = Path(__file__).parent / "slow_link.py"
MULTINODE = ROOT / "launch" / "multinode.sh"
PORT = 29400
_INSIDE = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


@dataclass
class Started:
    """A command on a host, and what it says."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout: float = 120) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.text[-4000:]}") from None

    def wait_for(self, words: str, times: int = 1, timeout: float = 120) -> float:
        """When it was said so many times, on the monotonic clock."""
        deadline = time.monotonic() + timeout
        while self.text.count(words) < times:
            assert time.monotonic() < deadline, f"no {words!r} after {timeout} s:\n{self.text[-4000:]}"
            assert self.process.poll() is None, f"ended without {words!r}:\n{self.text[-4000:]}"
            time.sleep(0.05)
        return time.monotonic()


class Hosts:
    """So many hosts, numbered from 1; to be made by `hosts_of`, which removes them."""

    def __init__(self, count: int, folder: Path) -> None:
        self.count, self.folder = count, folder
        self.tag = f"ddpt-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._switch = f"{self.tag}-switch"
        self._started: list[Started] = []
        self._cables: list[subprocess.Popen[str]] = []
        self.names = "127.0.0.1 localhost\n" + "".join(
            f"{self.address(host)} {self.name(host)}\n" for host in range(1, count + 1)
        )
        """What the hosts' files say."""

    def name(self, host: int) -> str:
        return f"host{host}"

    def address(self, host: int) -> str:
        return f"10.77.0.{host}"

    def build(self, slow: int = 0, delay: float = 0.0, loss: float = 0.0) -> None:
        """slow: a host whose cable delays by so many seconds each way, and loses a share of the frames."""
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for host in range(1, self.count + 1):
            space = self._space(host)
            _ip("netns", "add", space)
            if host == slow:
                self._cables.append(self._slow_cable(host, delay, loss))
            else:
                ends = ["type", "veth", "peer", "name", "eth0", "netns", space]
                _ip("-n", self._switch, "link", "add", f"port{host}", *ends)
            _ip("-n", self._switch, "link", "set", f"port{host}", "master", "bridge", "up")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")

    def remove(self) -> None:
        """Every process on the hosts, and the hosts."""
        spaces = [self._space(host) for host in range(1, self.count + 1)]
        for space in spaces:
            listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
            for pid in listed.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for started in self._started:
            started.process.wait()
        for cable in self._cables:
            cable.kill()
            cable.wait()
        for space in [*spaces, self._switch]:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)

    def start(self, host: int, words: Sequence[str], **variables: str) -> Started:
        """A command on a host, in the folder of all."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in RANK_VARIABLES and not name.startswith(("PET_", "GLOO_", "NCCL_", "TORCH"))
        }
        inherited["PATH"] = f"{Path(sys.executable).parent}:{inherited['PATH']}"
        log = self.folder / f"{self.name(host)}-{len(self._started)}.txt"
        names = self.folder / f"{self.name(host)}-names.txt"
        names.write_text(self.names)
        with log.open("wb") as said:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._space(host), "unshare", "--uts", "--mount", "sh", "-c", _INSIDE,
                 "sh", self.name(host), str(names), *words],
                cwd=self.folder,
                env={**inherited, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **variables},
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self._started.append(Started(process, log))
        return self._started[-1]

    def cut(self, host: int) -> float:
        """Pull a host's cable out of the switch; when that was."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "down")
        return time.monotonic()

    def mend(self, host: int) -> float:
        _ip("-n", self._switch, "link", "set", f"port{host}", "up")
        return time.monotonic()

    def add_nic(self, host: int, name: str, address: str) -> None:
        """One more interface, that leads nowhere."""
        _ip("-n", self._space(host), "link", "add", name, "type", "bridge")
        _ip("-n", self._space(host), "addr", "add", address, "dev", name)
        _ip("-n", self._space(host), "link", "set", name, "up")

    def drop_answers(self, host: int, to: int, end: bool = False) -> None:
        """What a firewall does that says nothing: what this host sends to another is lost."""
        _ip("-n", self._space(host), "route", "del" if end else "add", "blackhole", self.address(to))

    def pids(self, host: int) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self._space(host)], capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def _slow_cable(self, host: int, delay: float, loss: float) -> "subprocess.Popen[str]":
        between = [self._space(host), "eth0", self._switch, f"port{host}"]
        with (self.folder / f"cable-{host}.txt").open("w") as said:
            cable = subprocess.Popen(
                [sys.executable, str(SLOW_LINK), *between, str(delay), str(loss)], stdout=said
            )
        deadline = time.monotonic() + 20
        while "ready" not in (self.folder / f"cable-{host}.txt").read_text():
            assert cable.poll() is None, "slow_link.py ended"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return cable

    def _space(self, host: int) -> str:
        return f"{self.tag}-{host}"


@contextlib.contextmanager
def hosts_of(
    count: int, folder: Path, slow: int = 0, delay: float = 0.0, loss: float = 0.0
) -> Iterator[Hosts]:
    """Hosts that are gone afterwards, whatever happens (`Hosts.build`). Skips where this machine lets nobody
    make any."""
    if why := why_none():
        pytest.skip(why)
    hosts = Hosts(count, folder)
    try:
        hosts.build(slow, delay, loss)
        yield hosts
    finally:
        hosts.remove()


def why_none() -> str:
    """Why no hosts can be made here; '' where they can."""
    if os.geteuid() != 0:
        return "NO HOSTS WERE TESTED: network namespaces need root"
    missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if missing:
        return f"NO HOSTS WERE TESTED: there is no {' and no '.join(missing)} (Debian: iproute2, util-linux)"
    name = f"ddpt-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"NO HOSTS WERE TESTED: ip netns add: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
