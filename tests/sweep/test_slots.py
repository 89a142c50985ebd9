"""Which GPUs a sweep packs its jobs over, by what a driver says: here stand-ins for its two libraries."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from shell import Ended, ddptrain
from sweeps import SWEPT, events

from ddptrain.tools.sweep.slots import memory_share

NVML = """
class NVMLError(Exception): value = 15
def nvmlInit(): {init}
def nvmlSystemGetDriverVersion(): return "580.1"
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index):
    if index in {lost}: raise NVMLError("GPU is lost")
    return index
def nvmlDeviceGetUUID(gpu): return f"GPU-{{gpu}}" if isinstance(gpu, int) else gpu
def nvmlDeviceGetMigMode(gpu): return (gpu in {divided}, False)
def nvmlDeviceGetMaxMigDeviceCount(gpu): return 2
def nvmlDeviceGetMigDeviceHandleByIndex(gpu, place): return f"MIG-{{gpu}}{{place}}"
def __getattr__(name):
    def refuse(*about): raise NVMLError("Not Supported")
    return refuse
"""
CUDA = """
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
"""
WORDS = f"--multirun --config-dir={SWEPT} recipe=swept task.point=1,2 sweep.dry_run=true device=cuda"


@pytest.fixture(autouse=True)
def _nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def planned(
    folder: Path, *more: str, init: str = "pass", lost: str = "()", divided: str = "()", **variables: str
) -> Ended:
    """A sweep's plan where the driver answers so, to its end."""
    (folder / "pynvml.py").write_text(NVML.format(init=init, lost=lost, divided=divided))
    environment = {"PYTHONPATH": str(folder), "LD_LIBRARY_PATH": str(folder), **variables}
    return ddptrain(folder, [*WORDS.split(), *more], **environment)


def test_a_gpu_that_is_lost_is_named_and_the_others_are_used(tmp_path: Path) -> None:
    plan = planned(tmp_path, lost="(0,)")
    assert plan.code == 0, plan.err
    assert "GPUs GPU-1 (all of this machine but GPU 0 (GPU is lost)): 1 job at once" in plan.out


def test_a_job_that_is_given_a_gpu_asks_for_it(tmp_path: Path) -> None:
    """Or it would train on the CPU where that GPU is lost meanwhile."""
    plan = planned(tmp_path, "device=auto")
    assert plan.out.splitlines()[1].endswith(" device=cuda run.dir=sweeps/swept/000"), plan.err


def test_each_slice_of_a_divided_gpu_takes_a_job(tmp_path: Path) -> None:
    plan = planned(tmp_path, divided="(0,)")
    assert "GPUs MIG-00, MIG-01, GPU-1 (all of this machine): 3 jobs at once" in plan.out, plan.err
    refused = planned(tmp_path, "sweep.gpus_per_job=2", divided="(0,)")
    assert refused.code == 2
    assert "sweep.gpus_per_job=2: these are slices of divided GPUs (MIG)" in refused.err


@pytest.mark.parametrize("silent", [{"init": "raise NVMLError('no library')"}, {"lost": "(0, 1)"}])
def test_where_nvml_is_silent_cuda_is_asked(tmp_path: Path, silent: dict[str, str]) -> None:
    """Or jobs that find CUDA would all train on its first GPU."""
    (tmp_path / "cuda.c").write_text(CUDA)
    build = ["cc", "-shared", "-fPIC", "-o", "libcuda.so.1", "cuda.c"]
    subprocess.run(build, cwd=tmp_path, check=True)
    plan = planned(tmp_path, **silent)
    assert "GPUs 0, 1 (as CUDA counts them, NVML tells of none): 2 jobs at once" in plan.out, plan.err


def test_where_both_are_silent_there_is_no_gpu(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")
    refused = planned(tmp_path, init="raise NVMLError('no library')")
    assert refused.code == 2
    assert "device=cuda: this machine shows no GPU (NVML: no library; CUDA: " in refused.err


def test_jobs_that_share_a_gpu(tmp_path: Path) -> None:
    """Each GPU takes three; MPS is told of as its own program answers."""
    words = ("sweep.jobs_per_gpu=3",)
    plan = planned(tmp_path, *words)
    first = plan.out.splitlines()[0]
    assert "GPUs GPU-0, GPU-1 (all of this machine): 6 jobs at once, each 1 rank" in first, plan.err
    assert "at most 32% of a GPU's memory; without MPS, so that the jobs of a GPU take turns" in first
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text('#!/bin/sh\nread command\ntest "$command" = get_server_list\n')
    control.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert "; by MPS, so that kernels of several jobs run at once" in planned(tmp_path, *words, PATH=path).out


def test_what_can_not_share_a_gpu(tmp_path: Path) -> None:
    refused = planned(tmp_path, "sweep.jobs_per_gpu=2", "sweep.gpus_per_job=2")
    assert refused.code == 2
    assert "sweep.jobs_per_gpu=2: a job that shares a GPU has one rank." in refused.err
    refused = planned(tmp_path, "sweep.jobs_per_gpu=2", "device=cpu")
    assert refused.code == 2
    assert "sweep.jobs_per_gpu=2: there is no GPU to share (device=cpu)." in refused.err


def test_what_jobs_on_a_gpu_may_allocate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that are there stay; PyTorch's own parser takes them."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    share = memory_share(3)["PYTORCH_ALLOC_CONF"]
    assert share == "expandable_segments:True,per_process_memory_fraction:0.3167"
    assert memory_share(1) == {}
    read = "import torch; torch._C._accelerator_setAllocatorSettings('expandable_segments:False')"
    for settings, code in ((share, 0), ("per_process_memory_fraction:1.3", 1)):
        variables = {**os.environ, "PYTORCH_ALLOC_CONF": settings}
        ended = subprocess.run([sys.executable, "-c", read], env=variables, capture_output=True, text=True)
        assert ended.returncode == code, ended.stderr


def test_a_gpu_that_is_lost_takes_no_more_jobs(tmp_path: Path) -> None:
    """It ends each job within seconds, so that it would take all that wait; the one that it ended runs on
    another. (Here none has CUDA: all fail.)"""
    (tmp_path / "pynvml.py").write_text(
        "import os\n"
        + NVML.format(init="pass", lost="((0,) if os.path.exists('sweep/000') else ())", divided="()")
    )
    words = [*WORDS.replace("sweep.dry_run=true ", "").split(), "sweep.dir=sweep", "task.point=1,2,3"]
    ended = ddptrain(tmp_path, words, PYTHONPATH=str(tmp_path))
    assert ended.code != 0
    assert "GPU-0 is lost: it takes no more jobs, and 000 waits for another GPU" in ended.err
    places = [(event["job"], event["gpus"]) for event in events(tmp_path, "started")]
    assert places[0] == (0, ["GPU-0"])
    assert [gpus for _, gpus in places].count(["GPU-0"]) == 1
    assert sorted(job for job, gpus in places if gpus == ["GPU-1"]) == [0, 1, 2]
