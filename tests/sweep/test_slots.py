"""Which GPUs a sweep packs its jobs over, by what a driver says: here stand-ins for its two libraries."""

import subprocess
from pathlib import Path

import pytest
from shell import Ended, ddptrain
from sweeps import SWEPT

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


def planned(folder: Path, *more: str, init: str = "pass", lost: str = "()", divided: str = "()") -> Ended:
    """A sweep's plan where the driver answers so, to its end."""
    (folder / "pynvml.py").write_text(NVML.format(init=init, lost=lost, divided=divided))
    return ddptrain(folder, [*WORDS.split(), *more], PYTHONPATH=str(folder), LD_LIBRARY_PATH=str(folder))


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
