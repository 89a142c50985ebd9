"""The same training, whatever the shell, the terminal and the folder are."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from shell import RANK_VARIABLES

WORDS = ["recipe=cnn_digits", "device=cpu", "train.steps=3", "log.every=1"]


@dataclass(frozen=True)
class Env:
    """variables: '' takes one away. folder: below which it is started. python: options of the interpreter.
    before: shell commands that change the machine, in namespaces of their own (root only)."""

    variables: dict[str, str] = field(default_factory=dict)
    folder: str = "x"
    python: Sequence[str] = ()
    words: Sequence[str] = ("run.dir=run",)
    umask: int = 0o022
    ranks: int = 1
    before: str = ""


CHECKOUT = Path(__file__).parents[2]
LOOPBACK = "ip link set lo up"
HOSTS = 'echo "{}" > ../hosts; mount --bind ../hosts /etc/hosts'
INSIDE = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "sh", "-c"]
ENVIRONMENTS = {
    "LANG=C": Env({"LANG": "C", "LC_ALL": "C"}),
    "LANG=C without UTF-8 mode": Env({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    "an ASCII terminal, in a folder beyond ASCII": Env({"PYTHONIOENCODING": "ascii"}, folder="mañana/日本"),
    "no HOME": Env({"HOME": ""}),
    "a HOME that is not there": Env({"HOME": "/proc/nowhere"}),
    "no PATH": Env({"PATH": ""}),
    "a narrow terminal": Env({"COLUMNS": "10", "LINES": "2"}),
    "TERM=dumb": Env({"TERM": "dumb", "NO_COLOR": "1"}),
    "umask 077": Env(umask=0o077),
    "python -O": Env(python=["-O"]),
    "python -OO": Env(python=["-OO"]),
    "warnings as errors": Env(python=["-W", "error"]),
    "a folder with blanks": Env(folder="a b  c"),
    "a folder with a newline": Env(folder="a\nb"),
    "a folder with quotes": Env(folder='it\'s "a" $HOME'),
    "a folder like an option": Env(folder="--help"),
    "variables of SLURM": Env(
        {"SLURM_JOB_ID": "3", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NODEID": "1"}
    ),
    "an address of another job": Env({"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}),
    "WORLD_SIZE=1": Env({"WORLD_SIZE": "1"}),
    "CUDA_VISIBLE_DEVICES=": Env({"CUDA_VISIBLE_DEVICES": "-1"}),
    "run.dir=.": Env(words=["run.dir=."], folder="x/run"),
    "a read-only checkout": Env(
        before=f"mount --bind {CHECKOUT} {CHECKOUT}; mount -o remount,ro,bind {CHECKOUT}"
    ),
    "no network": Env(before="ip link set lo down"),
    "a host whose name nobody knows": Env(
        before=f"{LOOPBACK}; {HOSTS.format('127.0.0.1 localhost')}", ranks=2
    ),
    "IPv6 only": Env(
        before=f"{LOOPBACK}; ip addr del 127.0.0.1/8 dev lo; {HOSTS.format('::1 localhost $(hostname)')}",
        ranks=2,
    ),
    "the usual port is taken": Env(
        before=f"{LOOPBACK}; {sys.executable} -m http.server --bind 127.0.0.1 29500 & sleep 2", ranks=2
    ),
}


def metrics(place: Path, env: Env) -> bytes:
    folder = place / env.folder
    folder.mkdir(parents=True)
    variables = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    variables |= {"OMP_NUM_THREADS": "1"}
    for name, value in env.variables.items():
        variables.pop(name, None)
        if value:
            variables[name] = value
    verb = ["launch", f"--nproc-per-node={env.ranks}"] if env.ranks > 1 else []
    words = [sys.executable, *env.python, "-m", "ddptrain", *verb, *WORDS, *env.words]
    if env.before:
        words = [*INSIDE, f'set -e; {env.before}; exec "$@"', "sh", *words]
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, timeout=240, umask=env.umask)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"Traceback" not in done.stderr
    (found,) = place.rglob("metrics.jsonl")
    return found.read_bytes()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], bytes]:
    """On a plain machine, on so many ranks."""
    return cache(lambda ranks: metrics(tmp_path_factory.mktemp("plain"), Env(ranks=ranks)))


@pytest.mark.long
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_training_ends_as_on_a_plain_machine(
    name: str, plain: Callable[[int], bytes], tmp_path: Path
) -> None:
    env = ENVIRONMENTS[name]
    if env.before and subprocess.run([*INSIDE, "ip link set lo up"], capture_output=True).returncode:
        pytest.skip("needs root, or the right to make namespaces, and ip of iproute2")
    assert metrics(tmp_path, env) == plain(env.ranks)


@pytest.mark.parametrize("name", ["an ASCII terminal, in a folder beyond ASCII"])
def test_some_of_them_in_every_run_of_the_tests(
    name: str, plain: Callable[[int], bytes], tmp_path: Path
) -> None:
    assert metrics(tmp_path, ENVIRONMENTS[name]) == plain(1)
