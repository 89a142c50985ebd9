"""``python -m ddptrain doctor`` as it is typed."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from shell import RANK_VARIABLES, ddptrain, refusal

from ddptrain.api.world import World
from ddptrain.doctor import all_reduce, examine
from ddptrain.doctor.facts import (
    AllReduce,
    Cluster,
    Driver,
    Facts,
    ProcessLimits,
    Settings,
    System,
    Torch,
    TorchCuda,
    TorchVision,
)
from ddptrain.doctor.findings import problems
from ddptrain.doctor.rules_cluster import examine_cluster
from ddptrain.doctor.show import print_cluster
from ddptrain.testing import run_ranks
from ddptrain.verbs.main import main

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")


def torchrun(cwd: Path, words: str, *options: str) -> "subprocess.Popen[str]":
    inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, "-m", "ddptrain", "doctor", *words.split()],
        cwd=cwd, env={**inherited, "OMP_NUM_THREADS": "1"}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


# -- on this machine ---------------------------------------------------------------------------------


@no_gpu
def test_without_a_gpu_it_says_why_and_what_to_do(tmp_path: Path) -> None:
    ended = ddptrain(tmp_path, "doctor")
    lines = ended.out.splitlines()
    assert ended.code == 1, ended.err
    assert lines[0].startswith("ddptrain 0.1.0 doctor")
    assert [line.split()[1] for line in lines if line.startswith("problem ")] == [lines[1].split()[1]]
    assert lines[1].split()[1] in ("no-gpu", "container-without-gpus", "no-driver")
    assert lines[2].startswith("  cause   there is no NVIDIA device node (/dev/nvidiactl): ")
    assert lines[-1].startswith(f"Do this first ({lines[1].split()[1]}): ")
    assert "computes  cpu in fp32 (matrix product" in ended.out
    assert "\033" not in ended.out
    assert ended.err == ""


@pytest.mark.long
def test_with_the_cpu_asked_for_a_sound_machine_is_sound(tmp_path: Path) -> None:
    ended = ddptrain(tmp_path, "doctor device=cpu workers=0 --json", OMP_NUM_THREADS="1")
    assert ended.code == 0, ended.out
    told = json.loads(ended.out)
    assert told["problems"] == 0
    assert [told["facts"][name] for name in ("driver", "cuda", "torch_cuda")] == [None] * 3
    assert {"torchvision", "cpu", "computes"} <= {finding["id"] for finding in told["findings"]}
    assert len(told["facts"]["proofs"]) >= 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("device=gpu", "device=gpu: must be auto, cpu, cuda or cuda:<index>"),
        ("device=cuda:x", "device=cuda:x: must be"),
        ("workers=-1", "workers=-1: must be a whole number from 0 to 1024"),
        ("workers=few", "workers=few: must be a whole number"),
        ("port=70000", "port=70000: must be a whole number from 1 to 65535"),
        ("ports=1", "ports=1: doctor takes device=, workers=, port= only. Did you mean port?"),
        ("here", "here: doctor takes words of the form name=value only"),
        ("--cluster", "torchrun --standalone --nproc-per-node=2 -m ddptrain doctor --cluster"),
        ("--jsn", "--jsn: there is no such option. Did you mean --json?"),
    ],
)
def test_wrong_words_are_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_under_torchrun_it_wants_to_know_whether_all_nodes_are_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ddptrain.verbs.main.end_with_agent", lambda: None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert main(["doctor"]) == 2
    assert "Add --cluster" in capsys.readouterr().err


def test_help_lists_words_levels_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "-h"]) == 0
    out = capsys.readouterr().out
    for words in ("device=auto|cuda|cuda:<i>|cpu", "workers=<n>", "problem", "Exit codes:"):
        assert words in out


@no_gpu
def test_training_that_asks_for_cuda_gets_the_diagnosis(tmp_path: Path) -> None:
    message = refusal(tmp_path, "recipe=cnn_digits device=cuda").strip()
    assert message.startswith("device=cuda: there is no NVIDIA device node (/dev/nvidiactl): ")
    assert message.endswith("python -m ddptrain doctor says more.")
    assert "device=cpu" in message
    assert "\n" not in message


def test_training_asks_the_driver_only_where_files_show_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = System(device_nodes=("/dev/nvidiactl", "/dev/nvidia0"))
    old = Driver("470.1")
    monkeypatch.setattr(examine, "as_built", lambda: Torch("2.15.0+cu132", "13.2"))
    monkeypatch.setattr(examine, "ask_gpus", lambda: TorchCuda(0, "too old"))
    monkeypatch.setattr(examine, "of_the_driver", lambda: ["driver"])
    monkeypatch.setattr(examine, "still", list)
    asked: list[Any] = []

    def answer(_: Settings, probes: list[Any]) -> Facts:
        asked.append(probes)
        return Facts(Settings("cuda"), system=nodes, driver=old if probes else None)

    monkeypatch.setattr(examine, "collect", answer)
    assert examine.why_no_cuda() == (
        "CUDA 13.2, which this PyTorch brings, needs a driver of version 580 or later.",
        "Remedy: update the driver to 580 or later (sudo ubuntu-drivers install, or sudo dnf update; for a"
        " container on its host), and reboot.",
    )
    nodes = dataclasses.replace(nodes, device_nodes=())
    assert "no GPU in this machine" in examine.why_no_cuda()[0]
    assert asked == [[], ["driver"], []]


# -- several nodes -----------------------------------------------------------------------------------


@pytest.mark.long
@no_gpu
def test_two_ranks_of_one_node_both_end_with_its_problem(tmp_path: Path) -> None:
    out, err = torchrun(tmp_path, "--cluster", "--standalone", "--nproc-per-node=2").communicate(timeout=120)
    assert err.count("exitcode  : 1 ") == 2, err
    assert out.count("problem   ") == 1
    assert "all-reduce  gloo, 17 MB among 2 ranks: " in out
    assert "Do this first (" in out


@pytest.mark.long
def test_two_nodes_are_asked_and_told_apart(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet_at = f"--rdzv-endpoint=127.0.0.1:{free.getsockname()[1]}"
    options = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=doctor", meet_at)
    nodes = [torchrun(tmp_path, "--cluster --json device=cpu workers=0", *options) for _ in range(2)]
    outs = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outs
    told = [json.loads(out) for out, _ in outs if out]
    assert len(told) == 1, "rank 0 alone prints"
    facts = told[0]["facts"]
    name = socket.gethostname()
    assert [node["system"]["name"] for node in facts["nodes"]] == [f"{name}#0", f"{name}#1"]
    assert [(result["rank"], result["node"]) for result in facts["all_reduces"]] == [
        (0, f"{name}#0"),
        (1, f"{name}#1"),
    ]
    assert all(result["gb_per_s"] > 0 for result in facts["all_reduces"])
    assert "all-reduce" in {finding["id"] for finding in told[0]["findings"]}


def node(name: str, python: str = "3.11.7", version: str = "2.15.0", driver: str = "580.1") -> Facts:
    built = Torch(version, "13.2", nccl=f"of {version}", cpu="AVX2", cpu_features=("AVX2",))
    return Facts(
        Settings("cpu"), system=System(name, python=python, ddptrain="0.1.0"), torch=built,
               driver=Driver(driver),
        limits=ProcessLimits(4, 4, shm_total=2**34, shm_free=2**34), torchvision=TorchVision("0.29"),
    )  # fmt: skip


CLUSTERS = {
    "differs-torch": (
        Cluster((node("a"), node("b", version="2.14.0"))), "problem", "a 2.15.0, b 2.14.0",
        "from one image"),
    "differs-python": (Cluster((node("a"), node("b", python="3.12.1"))), "warning", "b 3.12.1",
    "image"),
    "differs-driver": (Cluster((node("a"), node("b", driver=""))), "warning", "a 580.1, b none",
    "image"),
}  # fmt: skip


@pytest.mark.parametrize("id", CLUSTERS)
def test_what_differs_between_nodes_is_told(id: str) -> None:
    cluster, level, seen, remedy = CLUSTERS[id]
    found = [finding for finding in examine_cluster(cluster) if finding.level != "ok"]
    assert [(finding.id, finding.level) for finding in found] == [(id, level)]
    assert seen in found[0].evidence
    assert remedy in found[0].remedy


def test_what_all_nodes_share_is_told_once() -> None:
    small = ProcessLimits(4, 4, shm_total=2**26, shm_free=2**26)
    nodes = [dataclasses.replace(node(name), limits=small) for name in "abc"]
    found = examine_cluster(Cluster((*nodes, node("d"))))
    assert [(finding.id, finding.node) for finding in found if finding.level == "problem"] == [
        ("shm-small", "a, b, c")
    ]
    assert next(finding.node for finding in found if finding.id == "cpu") == "all 4 nodes"


def test_the_table_has_a_row_for_each_node(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster((node("alpha"), node("beta", version="2.14.0")))
    print_cluster(cluster, examine_cluster(cluster))
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "2.1" in line]
    assert [row[0] for row in rows] == ["alpha", "beta"]
    assert rows[1][2] == "2.14.0"


def among_all(*errors: str, hung: int | None = None) -> Cluster:
    """A rank on each of the nodes a, b, c: what it says of the all-reduce; the one that has only waited."""
    results = [
        AllReduce(name, rank, "gloo", 17.0, 0.0 if error else 2.0 + rank, error, rank == hung)
        for rank, (name, error) in enumerate(zip("abc", errors, strict=True))
    ]
    return Cluster(tuple(node(name) for name in "abc"), tuple(results))


def test_an_all_reduce_is_as_fast_as_its_slowest_rank() -> None:
    shown = [
        finding.evidence for finding in examine_cluster(among_all("", "", "")) if finding.id == "all-reduce"
    ]
    assert shown == ["gloo, 17 MB among 3 ranks: 2.00 GB/s"]


@pytest.mark.parametrize(
    ("cluster", "node", "evidence"),
    [
        (among_all("no end in 120 s", "", "no route", hung=0), "c", "gloo, rank 2 on c: no route"),
        (among_all("no end in 120 s", "", "", hung=0), "a", "gloo, rank 0 on a: no end in 120 s"),
        (among_all("no route", "no route", "no route"), "all 3 nodes", "gloo, rank 0 on a: no route"),
    ],
)
def test_the_node_on_which_the_all_reduce_fails_is_named(cluster: Cluster, node: str, evidence: str) -> None:
    wrong = problems(examine_cluster(cluster))
    assert [(finding.id, finding.node, finding.evidence) for finding in wrong] == [
        ("all-reduce-fails", node, evidence)
    ]
    assert "GLOO_SOCKET_IFNAME" in wrong[0].remedy


def test_a_rank_that_fails_is_told_from_those_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no route to host\nmore")

    def measure(world: World) -> AllReduce:
        if world.rank == 1:
            monkeypatch.setattr(all_reduce.dist, "all_reduce", refuse)
        return all_reduce.measure_all_reduce(world, "abc"[world.rank], None, timeout_s=2)

    results = run_ranks(measure, 3)
    assert [(result.node, result.error, result.hung) for result in results] == [
        ("a", "no end in 2 s", True),
        ("b", "no route to host", False),
        ("c", "no end in 2 s", True),
    ]
