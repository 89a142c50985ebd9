"""The verb ``launch``: what it refuses, which failures it restarts, and the exit codes it gives."""

import json
import os
import random
import signal
import socket
import time
from pathlib import Path

import pytest
from composed import made
from jobs import FAULTY, WITH_WORKERS, Start, launch, torchrun
from running import stopped_steps
from shell import ddptrain, refusal, without_torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher.api import LaunchConfig

from ddptrain.distributed.launcher.agent import Cause, NodeResult, cause_of
from ddptrain.distributed.launcher.process import AGENT
from ddptrain.run import launch as run_launch

TWO = ["--nproc-per-node=2"]
TYPED = "recipe=cnn_cifar10 data=shapes device=cpu"


def own_lines(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("ddptrain launch: ")]


def test_help_names_options_and_exit_codes_at_once(tmp_path: Path) -> None:
    ended = without_torch(tmp_path, "launch --help")
    assert ended.code == 0
    for word in ("--nproc-per-node", "--max-restarts", "--rdzv-id", "75", "76"):
        assert word in ended.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (f"launch --nproc-per-nod=2 {TYPED}", "no such option. Did you mean --nproc-per-node?"),
        (f"launch --max_restarts many {TYPED}", "--max-restarts: invalid int value: 'many'"),
        (f"launch --nnodes=2 --max-restarts=1 {TYPED}", "--rdzv-backend=c10d"),
        (f"launch --nnodes=1:2 --rdzv-backend=c10d --rdzv-endpoint=here:1 {TYPED}", "--rdzv-id: give the"),
        (f"launch --nnodes=1:2 --rdzv-backend=c10d --rdzv-endpoint=a:1 --rdzv-id=b {TYPED} run.resume=never",
         "run.resume=never: a node that joins"),
        (f"launch --nproc-per-node=2 {TYPED} +model.wdith=2", "Did you mean model.width?"),
        (f"launch --nproc-per-node=2 {TYPED} sched.warmup=2", "sched.warmup=2: must be"),
        (f"launch --nproc-per-node=2 {TYPED} +observers.console.evry=2", "observers.console.evry"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_before_a_rank_starts(tmp_path: Path, arguments: str, said: str) -> None:
    assert said in refusal(tmp_path, arguments)
    assert not list(tmp_path.iterdir())


def test_one_gpu_that_is_named_gets_one_rank(tmp_path: Path) -> None:
    """A GPU that is not there here: which ranks there are is said before they look for it."""
    ended = ddptrain(tmp_path, f"launch {TYPED.replace('device=cpu', 'device=cuda:99')}")
    assert ended.code == 2
    assert own_lines(ended.err)[0].startswith("ddptrain launch: 1 rank (device=cuda:99 is one GPU), ")


@pytest.mark.faults
def test_a_killed_rank_is_restarted_in_the_same_folder(tmp_path: Path) -> None:
    """Its folder has the default name, which comes from the id that launch gives the job."""
    fault = ["task.fault=kill", "task.rank=1", "task.step=9", "run.dir=null"]
    code, said = launch(tmp_path, [*TWO, "--max-restarts=2"], [*FAULTY, *fault]).wait()
    assert code == 0, said
    [run] = (tmp_path / "runs/faulty").iterdir()
    assert json.loads((run / "summary.json").read_text())["outcome"] == "done"
    assert "resumed    " in said
    first, restarted = own_lines(said)
    assert first.startswith("ddptrain launch: 2 ranks, ")
    assert "rank 1 on " in restarted
    assert restarted.endswith(" was killed by SIGKILL: restart 1 of 2")


def test_a_users_mistake_costs_no_restart_and_its_message_is_the_last(tmp_path: Path) -> None:
    fault = ["task.fault=user_error", "task.rank=1", "task.step=9", "task.once=false"]
    code, said = launch(tmp_path, [*TWO, "--max-restarts=2"], [*FAULTY, *fault]).wait()
    assert code == 2
    assert said.splitlines()[-1] == "ddptrain: data/7.png: is no picture."
    assert len(own_lines(said)) == 1


def test_a_signal_stops_the_ranks_with_a_checkpoint(tmp_path: Path) -> None:
    job = launch(tmp_path, [*TWO, "--max-restarts=2"], [*FAULTY, "train.steps=100000", "data.pace=0.01"])
    job.wait_for("step 10/")
    job.launcher.send_signal(signal.SIGUSR1)
    code, said = job.wait()
    assert code == 75, said
    assert not job.left_after(2.0)
    assert own_lines(said)[-1].endswith(" stopped on request; 0 of 2 restarts used; exit code 75")
    saved = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "r/checkpoints").glob("step-*"))
    assert stopped_steps(said) == [saved]


@pytest.mark.parametrize(
    ("launcher", "moment"),
    [pytest.param(torchrun, "step 3/", marks=pytest.mark.long), (launch, "step 3/"), (launch, "")],
)
def test_nothing_outlives_a_killed_agent(tmp_path: Path, launcher: Start, moment: str) -> None:
    """No rank, no loader worker, no forkserver: one whose rank died before its imports ends after them."""
    job = launcher(tmp_path, TWO, WITH_WORKERS)
    job.wait_for(moment)
    time.sleep(random.random() * (1 if moment else 6))
    os.kill(job.launcher.pid, signal.SIGKILL)
    job.launcher.wait()
    assert not job.left_after(10.0)


def test_a_rank_whose_torchrun_died_before_it_had_started_ends_at_once(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        variables = {
            "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(closed.getsockname()[1]),
            "TORCHELASTIC_RUN_ID": "gone", "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        ended = ddptrain(tmp_path, "recipe=cnn_digits device=cpu", **variables)
    assert ended.code == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_the_rank_that_crashed_is_named_though_its_peers_were_gone_first(tmp_path: Path) -> None:
    for rank, age in ((1, 5.0), (2, 0.0)):
        path = tmp_path / f"{rank}.json"
        trace = {"message": f"ValueError: of rank {rank}\nmore", "extraInfo": {"timestamp": "1"}}
        path.write_text(json.dumps({"message": trace}))
        os.utime(path, (1e9 - age, 1e9 - age))
    failures = {
        rank: ProcessFailure(rank, 1000 + rank, code, str(tmp_path / f"{rank}.json"))
        for rank, code in ((0, 1), (1, -signal.SIGABRT), (2, 1))
    }
    assert cause_of({0: 1}, failures) == Cause(1, 1, "ValueError: of rank 1")
    assert cause_of({0: 1, 2: -signal.SIGKILL}, failures) == Cause(2, -signal.SIGKILL)
    assert cause_of({0: 1, 2: 76}, failures) == Cause(2, 76)
    assert cause_of({0: -signal.SIGABRT, 1: 1}, {}) == Cause(1, 1)


def test_a_stopped_rank_that_was_killed_for_it_is_a_hang(tmp_path: Path) -> None:
    """By the rank that tells of it, which may end after it."""
    failures = {
        rank: ProcessFailure(rank, 1000 + rank, code, str(tmp_path / "none"))
        for rank, code in ((0, -signal.SIGKILL), (1, -signal.SIGTERM), (2, 76))
    }
    assert cause_of({0: -signal.SIGKILL}, failures) == Cause(2, 76)


def test_a_signal_is_told_as_shells_count_it() -> None:
    assert Cause(1, -signal.SIGKILL).exit_code == 137
    assert Cause(1, -signal.SIGTERM).exit_code == 143
    assert Cause(1, 76).exit_code == 76
    assert "rank 1 on " in str(Cause(1, -signal.SIGKILL))


@pytest.mark.parametrize(
    ("options", "grace", "seconds"),
    [([], "25", 30), ([], "5", 30), ([], "99.5", 105), (["--shutdown-timeout=7"], "25", 7)],
)
def test_ranks_are_killed_after_their_grace(
    options: list[str], grace: str, seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = made("cnn_digits", tmp_path, "device=cpu", f"checkpoint.grace={grace}")[0]
    seen: list[LaunchConfig] = []

    def started(agent: LaunchConfig, *others: object) -> NodeResult:
        seen.append(agent)
        return NodeResult(0)

    monkeypatch.setenv("LOGLEVEL", "ERROR")
    monkeypatch.setenv(AGENT, "")
    monkeypatch.setattr(run_launch, "run_ranks", started)
    assert run_launch.run(config, options, [], None) == 0
    assert seen[0].shutdown_timeout == seconds
