"""``python -m ddptrain doctor`` as it is typed."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from shell import RANK_VARIABLES, ddptrain, refusal

from ddptrain.api.world import World
from ddptrain.doctor import examine, meet
from ddptrain.doctor.facts import (
    Cluster,
    Driver,
    Facts,
    Link,
    ProcessLimits,
    Settings,
    System,
    Torch,
    TorchCuda,
    TorchVision,
)
from ddptrain.doctor.rules_cluster import examine_cluster
from ddptrain.doctor.show import json_of, print_cluster
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


def test_with_the_cpu_asked_for_a_sound_machine_is_sound_and_json_is_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = ddptrain(tmp_path, "doctor device=cpu workers=0 --json", OMP_NUM_THREADS="1")
    assert ended.code == 0, ended.out
    told = json.loads(ended.out)
    assert told["problems"] == 0
    assert [told["facts"][name] for name in ("driver", "cuda", "torch_cuda")] == [None] * 3
    assert {"torchvision", "cpu", "computes"} <= {finding["id"] for finding in told["findings"]}
    assert len(told["facts"]["proofs"]) >= 5
    file = tmp_path / "doctor.json"
    file.write_text(ended.out)
    assert main(["doctor", f"facts={file}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == told


def test_somebody_elses_facts_are_judged_without_a_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = Facts(
        Settings("cuda"), torch=Torch("2.15.0+cpu"), system=System(kind="Windows"), limits=ProcessLimits(8, 8)
    )
    file = tmp_path / "doctor.json"
    file.write_text(json_of(facts, []))
    assert main(["doctor", f"facts={file}"]) == 1
    out = capsys.readouterr().out
    assert "problem   torch-cpu-build  PyTorch 2.15.0+cpu, CUDA None\n  cause   the installed PyTorch" in out
    assert out.splitlines()[-1].startswith(
        "Do this first (torch-cpu-build): pip install --force-reinstall torch"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("device=gpu", "device=gpu: must be auto, cpu, cuda or cuda:<index>"),
        ("device=cuda:x", "device=cuda:x: must be"),
        ("workers=-1", "workers=-1: must be a whole number from 0 to 1024"),
        ("workers=few", "workers=few: must be a whole number"),
        ("port=70000", "port=70000: must be a whole number from 1 to 65535"),
        ("ports=1", "ports=1: doctor takes device=, workers=, port=, facts= only. Did you mean port?"),
        ("facts=none.json", "facts=none.json: must be what python -m ddptrain doctor --json printed"),
        ("facts=a.json device=cpu", "facts=a.json: says by itself what was asked"),
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
    for words in ("device=auto|cuda|cuda:<i>|cpu", "workers=<n>", "facts=<file>", "problem", "Exit codes:"):
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
        "CUDA 13.2, which this PyTorch brings, needs a driver of version 580 or later. Update the driver to"
        " 580"
        " or later (sudo ubuntu-drivers install, or sudo dnf update; for a container on its host), and"
        " reboot."
    )
    nodes = dataclasses.replace(nodes, device_nodes=())
    assert "no GPU in this machine" in examine.why_no_cuda()
    assert asked == [[], ["driver"], []]


# -- several nodes -----------------------------------------------------------------------------------


@no_gpu
def test_two_ranks_of_one_node_both_end_with_its_problem(tmp_path: Path) -> None:
    out, err = torchrun(tmp_path, "--cluster", "--standalone", "--nproc-per-node=2").communicate(timeout=120)
    assert err.count("exitcode  : 1 ") == 2, err
    assert out.count("problem   ") == 1
    assert "all-reduce  gloo, 17 MB: " in out
    assert "Do this first (" in out


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
    assert [link["members"] for link in facts["links"]] == [[f"{name}#0:0", f"{name}#1:1"]]
    assert facts["links"][0]["gb_per_s"] > 0
    assert abs(facts["skews"][1]) < 0.5, "they have one clock"
    assert {"clock-skew", "all-reduce"} <= {finding["id"] for finding in told[0]["findings"]}


def node(name: str, python: str = "3.11.7", version: str = "2.15.0", driver: str = "580.1") -> Facts:
    built = Torch(version, "13.2", nccl=f"of {version}", cpu="AVX2", cpu_features=("AVX2",))
    return Facts(
        Settings("cpu"), system=System(name, python=python, ddptrain="0.1.0"), torch=built,
               driver=Driver(driver),
        limits=ProcessLimits(4, 4, shm_total=2**34, shm_free=2**34), torchvision=TorchVision("0.29"),
    )  # fmt: skip


CLUSTERS = {
    "clock-skew": (Cluster((node("a"), node("b")), (0.0, -3.25)), "warning", "b -3.250 s",
    "timedatectl set-ntp"),
    "differs-torch": (
        Cluster((node("a"), node("b", version="2.14.0")), (0.0, 0.1)), "problem", "a 2.15.0, b 2.14.0",
        "from one image"),
    "differs-python": (Cluster((node("a"), node("b", python="3.12.1")), (0.0, 0.1)), "warning", "b 3.12.1",
    "image"),
    "differs-driver": (Cluster((node("a"), node("b", driver="")), (0.0, 0.1)), "warning", "a 580.1, b none",
    "image"),
    "all-reduce-fails": (
        Cluster((node("a"), node("b")), (0.0, 0.1), (Link(("a:0", "b:1"), "gloo", 17.0, 0.0, "timed out"),)),
        "problem", "gloo: timed out", "GLOO_SOCKET_IFNAME"),
    "slow-pair": (
        Cluster((node("a"), node("b"), node("c")), (0.0, 0.0, 0.0),
                (Link(("a:0", "b:1"), "gloo", 17.0, 2.0), Link(("a:0", "c:2"), "gloo", 17.0, 0.1))),
        "warning", "a:0-c:2 0.10 GB/s", "wires"),
}  # fmt: skip


@pytest.mark.parametrize("id", CLUSTERS)
def test_what_differs_between_nodes_is_told(id: str) -> None:
    cluster, level, seen, remedy = CLUSTERS[id]
    found = [finding for finding in examine_cluster(cluster) if finding.level != "ok"]
    assert [(finding.id, finding.level) for finding in found] == [(id, level)]
    assert seen in found[0].seen
    assert remedy in found[0].remedy


def test_what_all_nodes_share_is_told_once() -> None:
    small = ProcessLimits(4, 4, shm_total=2**26, shm_free=2**26)
    nodes = [dataclasses.replace(node(name), limits=small) for name in "abc"]
    found = examine_cluster(Cluster((*nodes, node("d")), (0.0,) * 4))
    assert [(finding.id, finding.node) for finding in found if finding.level == "problem"] == [
        ("shm-small", "a, b, c")
    ]
    assert next(finding.node for finding in found if finding.id == "cpu") == "all 4 nodes"


def test_the_table_has_a_row_for_each_node(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster((node("alpha"), node("beta", version="2.14.0")), (0.0, 1.5))
    print_cluster(cluster, examine_cluster(cluster))
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "2.1" in line]
    assert [row[0] for row in rows] == ["alpha", "beta"]
    assert rows[1][2] == "2.14.0"
    assert "+1.500" in rows[1]


def test_a_clock_that_is_ahead_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(world: World) -> tuple[float, ...]:
        if world.rank == 2:
            true = time.time
            monkeypatch.setattr(meet.time, "time", lambda: true() + 5.0)
        return meet.clock_skews(world.rank, [0, 1, 2])

    skews = run_ranks(measure, 3)[0]
    assert skews[0] == 0.0
    assert abs(skews[1]) < 0.5
    assert abs(skews[2] - 5.0) < 0.5


def test_every_group_adds_up() -> None:
    names = ["a", "b", "c"]
    links = run_ranks(lambda world: meet.links(world.rank, [[0, 1], [0, 2], [0, 1, 2]], names, None), 3)
    assert [link.members for link in links[0]] == [("a", "b"), ("a", "c"), ("a", "b", "c")]
    assert all(link.gb_per_s > 0 and link.error == "" for link in links[0])
