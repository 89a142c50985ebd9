"""What goes wrong on purpose: killed, stopped, out of memory; and what else shares a GPU."""

import json
import os
import re
import signal
import time

from gpu_parts.part import Job, NotHere, Ran, check_same, need, ranks_of, trained, wait_for
from gpu_parts.trainings import FEW_IMAGES

WORDS = ("recipe=cnn_cifar10", "data=shapes", *FEW_IMAGES, "precision=fp32")
LEAVE = 20.0
"""Seconds in which a job must have ended after one of its ranks was killed: less than ``checkpoint.grace``,
after which it would be ended anyhow."""


def kill(job: Job) -> str:
    return _killed(job, "device=cuda:0")


def nccl_kill(job: Job) -> str:
    return _killed(job, "device=cuda")


def _killed(job: Job, device: str) -> str:
    """SIGKILL of a rank: the others leave at once; the same command goes on to equal losses, bit by bit."""
    steps = job.pick(60, 8)
    words = [*WORDS, device, "deterministic=true", "log.every=1"]
    words += [f"train.steps={steps}", f"checkpoint.every={steps // 2}"]
    launch = ("-m", "ddptrain", "launch", "--nproc-per-node=2", "--max-restarts=0")
    whole = trained(job.folder / "whole", job.run("whole", *launch, *words, "run.dir=whole"))
    with job.started("killed", *launch, *words, "run.dir=killed") as process:
        wait_for(job, "killed", f"step {steps // 2 + 1}/", process)
        pids = ranks_of(process)
        need(sorted(pids) == [0, 1], f"the launcher's ranks are {sorted(pids)}, not 0 and 1")
        began = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        code = process.wait(120)
        seconds = time.monotonic() - began
    job.figure("seconds to the end", seconds)
    need(code not in (0, 2), f"exit code {code} after a rank was killed")
    again = trained(job.folder / "killed", job.run("again", *launch, *words, "run.dir=killed"))
    check_same(again.losses, whole.losses, exactly=True)
    need(seconds < LEAVE, f"the others ended {seconds:.1f} s after the kill; at most {LEAVE:.0f}")
    return f"ended {seconds:.1f} s after the kill with exit code {code}; resumed, the same losses to the bit"


def stop(job: Job) -> str:
    """SIGTERM: a checkpoint, exit code 75, and the same command goes on."""
    steps = job.pick(4000, 60)
    words = [*WORDS, "device=cuda", "log.every=1", f"train.steps={steps}", "run.dir=stopped"]
    with job.started("stopped", "-m", "ddptrain", *words) as process:
        wait_for(job, "stopped", "step 5/", process)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code = process.wait(120)
        seconds = time.monotonic() - began
    job.figure("seconds to the end", seconds)
    need(code == 75, f"exit code {code} after SIGTERM, not 75")
    saved = [folder.name for folder in (job.folder / "stopped/checkpoints").glob("step-*")]
    need(bool(saved), "no checkpoint was written")
    again = job.run("again", "-m", "ddptrain", *words)
    rows = trained(job.folder / "stopped", again).losses
    need(len(rows) == steps, f"{len(rows)} steps in metrics.jsonl after it went on, not {steps}")
    return f"stopped in {seconds:.1f} s with exit code 75, and went on"


def out_of_memory(job: Job) -> str:
    """One message with an override that may fit, and no restart spent; what it says is followed until it
    trains. Memory is bounded by torch's own allocator, so that small and large GPUs are asked the same."""
    words = ["recipe=cnn_cifar10", "data=shapes", "data.source.train=2048", "data.source.valid=64"]
    words += [
        f"train.batch_size={job.pick(2048, 512)}",
        "train.steps=1",
        "device=cuda:0",
        "observers=[console,jsonl,plots]",
    ]
    share = job.pick(400, 150) * 1e6 / _memory(job)
    bound = {"PYTORCH_CUDA_ALLOC_CONF": f"per_process_memory_fraction:{share:.5f}"}
    launch = ("-m", "ddptrain", "launch", "--nproc-per-node=1", "--max-restarts=2")
    followed: list[str] = []
    while len(followed) < 5:
        name = f"try-{len(followed)}"
        ran = job.run(name, *launch, *words, *followed[-1:], f"run.dir={name}", code=None, **bound)
        if ran.code == 0:
            break
        followed.append(_advice(job, ran))
    need(bool(followed), "it trains in so little memory: nothing was shown")
    need(ran.code == 0, f"it has followed {', '.join(followed)}, and still the memory is not enough")
    return f"one message, no restart; with the advised {followed[-1]} it trains"


def _advice(job: Job, ran: Ran) -> str:
    """The override that a run out of memory names."""
    said = ran.said + ran.out
    if "Unrecognized" in said and "llocator option" in said:
        raise NotHere("this torch can't bound a process's memory by PYTORCH_CUDA_ALLOC_CONF")
    job.figure("said", [line for line in said.splitlines() if line.startswith("ddptrain")])
    need("out of memory" in said.lower(), f"exit code {ran.code}, and nothing is said of memory")
    restarts = re.search(r"(\d) of 2 restarts used", said)
    need(not restarts or restarts[1] == "0", f"{restarts and restarts[1]} restarts were spent on it")
    need("Traceback" not in said, "a traceback is shown")
    advice = re.search(r"train\.micro_batch=\d+", said)
    need(advice is not None, "no override that could help is named")
    return advice[0] if advice else ""


def _memory(job: Job) -> int:
    code = "import torch; print(torch.cuda.get_device_properties(0).total_memory)"
    return int(job.run("memory", "-c", code).out.split()[-1])


def monitor(job: Job) -> str:
    """What the run reads of its GPU, in its summary and while it runs."""
    steps = job.pick(600, 8)
    training = job.train("watched", *WORDS, "log.every=2", f"train.steps={steps}")
    gpus = {
        name: device for name, device in training.summary.get("devices", {}).items() if name.startswith("gpu")
    }
    job.figure("gpus", gpus)
    need(bool(gpus), "the summary tells nothing of a GPU")
    for name, device in gpus.items():
        missing = {"utilisation", "memory_gib", "power_w", "temperature_c"} - set(device["mean"])
        need(not missing, f"{name}: no {', '.join(sorted(missing))}")
        need(device["peak"]["memory_gib"] > 0, f"{name}: no memory in use")
        need(device["readings"] > 0, f"{name}: no reading")
    return ", ".join(
        f"{name}: {device['readings']} readings of {device['name']}" for name, device in gpus.items()
    )


def two_jobs(job: Job) -> str:
    """A sweep takes one job after another to the GPU, on which another training runs at the same time."""
    other = [*WORDS, "device=cuda:0", f"train.steps={job.pick(2000, 20)}", "run.dir=other"]
    with job.started("other", "-m", "ddptrain", *other) as process:
        words = [*WORDS, "device=cuda", f"train.steps={job.pick(60, 4)}", "seed=1,2", "sweep.dir=sweep"]
        job.run("sweep", "-m", "ddptrain", "--multirun", *words, "sweep.max_parallel=1")
        need(process.wait() == 0, f"the training beside it ended with exit code {process.returncode}")
    summaries = sorted((job.folder / "sweep").glob("*/summary.json"))
    done = [json.loads(file.read_text())["outcome"] for file in summaries]
    need(done == ["done", "done"], f"the jobs' outcomes are {done}")
    logs = [(file.parent / "log.txt").read_text() for file in summaries]
    need(all("cuda:0" in log for log in logs), "a job was not on cuda:0")
    return "both jobs done on cuda:0, beside a training"
