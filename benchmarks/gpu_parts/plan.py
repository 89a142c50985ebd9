"""The hour's parts, the most telling first."""

from gpu_parts import captured, faults, trainings
from gpu_parts.losses import losses
from gpu_parts.machine import machine
from gpu_parts.modes import modes
from gpu_parts.part import Job, Part


def beside(job: Job) -> str:
    from gpu_parts.beside import beside  # brings torch

    return beside(job)


PARTS = {
    "machine": Part("What the device can do at all", machine, 60, 300),
    "doctor": Part("`doctor` finds no problem", trainings.doctor, 20, 120),
    "tests": Part("`pytest tests/gpu`", trainings.tests, 170, 590),
    "yolo": Part("The detector, with evaluations", trainings.yolo, 40),
    "cnn": Part("A CNN on drawn shapes", trainings.cnn, 25),
    "lstm": Part("An LSTM, 100 steps", trainings.lstm, 25),
    "transformer": Part("A Transformer, 100 steps", trainings.transformer, 25),
    "kernels": Part(
        "cuDNN's LSTM and a fused attention, by the trace", trainings.kernels, 40, needs=("profiles",)
    ),
    "sanitizer": Part("No race, by torch's CUDA sanitizer", trainings.sanitizer, 60, needs=("finds_races",)),
    "prove": Part("`prove resume`, deterministic", trainings.prove, 60, 590),
    "speedrun": Part("The speed recipe's work, eager", trainings.two_thousand, 20),
    "speedrun-compiled": Part(
        "The speed recipe's work, `compile=max-autotune`",
        trainings.max_autotune,
        150,
        590,
        ("compiles", "graphs"),
    ),
    "captured": Part("Captured steps of 14 recipes, by bits", captured.captured, 200, 590, ("graphs",)),
    "captured-prove": Part("`prove resume`, captured", captured.prove_captured, 60, 590, ("graphs",)),
    "modes": Part("A step eager, captured, compiled, and both", modes, 450, 590, ("graphs",)),
    "speedrun-captured": Part(
        "The speed recipe's work, `compile=graph`", captured.speedrun_captured, 20, 590, ("graphs",)
    ),
    "graphs-accumulation": Part(
        "CUDA graphs under accumulation", trainings.graphs_accumulation, 60, 300, ("compiles", "graphs")
    ),
    "graphs-text": Part(
        "CUDA graphs and a carried state", trainings.graphs_text, 60, 300, ("compiles", "graphs")
    ),
    "losses": Part("First losses of 14 recipes, against the CPU's", losses, 240, 590),
    "beside": Part("The engine beside a hand-written loop", beside, 180, 590),
    "shared": Part("Two ranks on one GPU, over gloo", trainings.shared_gpu, 40),
    "kill": Part("A rank is killed", faults.kill, 50),
    "stop": Part("SIGTERM", faults.stop, 40),
    "oom": Part("Out of memory", faults.out_of_memory, 40),
    "monitor": Part("The device monitor", faults.monitor, 25),
    "sweep": Part("A sweep beside a training, on one GPU", faults.two_jobs, 40),
    "bench": Part("`bench` of three recipes", trainings.bench, 240, 590),
    "nccl": Part("Two GPUs over NCCL, weights compared", trainings.nccl, 50, gpus=2),
    "dp": Part("`strategy=dp` on two GPUs", trainings.dp, 40, gpus=2),
    "nccl-kill": Part("A rank is killed, over NCCL", faults.nccl_kill, 60, gpus=2),
    "bench-ddp": Part("`bench ddp=true` on two GPUs", trainings.bench_ddp, 120, 590, gpus=2),
}
