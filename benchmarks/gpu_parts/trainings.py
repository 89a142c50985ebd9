"""Trainings that must end well on a GPU, and come to what is known of them."""

import gzip
import json
import re
import statistics
from collections.abc import Iterator, Sequence

from gpu_parts.machine import is_simulated
from gpu_parts.part import ROOT, Failed, Job, NotHere, Trained, check_same, need, speed

FEW_IMAGES = ("data.source.train=256", "data.source.valid=64", "train.batch_size=64")


def doctor(job: Job) -> str:
    ran = job.run("doctor", "-m", "ddptrain", "doctor", "device=cuda", code=None)
    problems = re.findall(r"^problem +(\S+)", ran.out + ran.said, re.MULTILINE)
    job.figure("problems", problems)
    job.figure("warnings", re.findall(r"^warning +(\S+)", ran.out + ran.said, re.MULTILINE))
    if (
        problems
        and is_simulated(job.lacks)
        and set(problems) <= {"no-gpu", "computes-wrong", "all-reduce-fails"}
    ):
        raise NotHere(f"{', '.join(problems)}, says doctor of a simulated device, as it should")
    need(ran.code == 0 and not problems, f"exit code {ran.code}, problems: {', '.join(problems)}")
    return "no problem found"


def tests(job: Job) -> str:
    words = ["-m", "pytest", str(ROOT / "tests/gpu"), "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    skipped = [test for test, ability in NEEDING.items() if ability in job.lacks]
    job.figure("left out", {test: job.lacks[NEEDING[test]] for test in skipped})
    skipped += ["fp32", "tf32", "fp16"] if job.small else []
    words += [f"-k=not ({' or '.join(skipped)})"] if skipped else []
    ran = job.run("tests", *words, "-c", str(ROOT / "pyproject.toml"), code=None)
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|skipped|error)", ran.out)}
    job.figure("counts", counts)
    failed = re.findall(r"^(?:FAILED|ERROR) \S*::(\S+)", ran.out, re.MULTILINE)
    job.figure("failed", failed)
    need(
        ran.code == 0 and counts.get("passed", 0) > 0, f"exit code {ran.code}, {counts}: {', '.join(failed)}"
    )
    without = f"; left out, by a word in their names: {', '.join(skipped)}" if skipped else ""
    return ", ".join(f"{count} {name}" for name, count in counts.items()) + without


NEEDING = {"trace": "profiles"}
"""Tests with such a word in their names need the device to have an ability."""


def yolo(job: Job) -> str:
    steps, every = job.pick(60, 4), job.pick(20, 2)
    words = ["recipe=yolo_shapes", f"train.steps={steps}", f"train.eval_every={every}", f"log.every={every}"]
    if job.small:
        words += ["data.source.train=32", "data.source.valid=16", "train.batch_size=8"]
    training = job.train("yolo", *words)
    job.figure("speed", speed(training))
    job.figure("valid", training.valid)
    need(len(training.valid) == steps // every, f"{len(training.valid)} evaluations, not {steps // every}")
    need(all(0 <= row["mAP"] <= 1 for row in training.valid), "an mAP is not from 0 to 1")
    return f"{steps} steps and {len(training.valid)} evaluations, {_falls(training, job)}"


def cnn(job: Job) -> str:
    words = [
        "recipe=cnn_cifar10",
        "data=shapes",
        f"train.steps={job.pick(400, 6)}",
        f"log.every={job.pick(20, 2)}",
    ]
    training = job.train("cnn", *words, *(FEW_IMAGES if job.small else ()))
    job.figure("speed", speed(training))
    accuracy = training.valid[-1]["accuracy"]
    need(job.small or accuracy > 0.9, f"accuracy {accuracy} after 400 steps; on a CPU it is over 0.9")
    return f"accuracy {accuracy:.3f}, {_falls(training, job)}"


def lstm(job: Job) -> str:
    return _text(job, "lstm_text")


def transformer(job: Job) -> str:
    return _text(job, "transformer_text")


def _text(job: Job, recipe: str) -> str:
    steps = job.pick(100, 4)
    training = job.train("text", f"recipe={recipe}", *text_words(job), f"train.steps={steps}", "log.every=2")
    job.figure("speed", speed(training))
    bits = training.valid[-1]["bits_per_byte"]
    need(job.small or bits < 6, f"{bits:.2f} bits per byte after {steps} steps")
    return f"{bits:.2f} bits per byte, {_falls(training, job)}"


def text_words(job: Job) -> list[str]:
    """A text of half a megabyte that every checkout has, so that little time goes into reading it."""
    file = job.folder / "text.txt"
    if not file.exists():
        sources = sorted(ROOT.glob("ddptrain/**/*.py"))
        file.write_text("".join(source.read_text() for source in sources)[: job.pick(500_000, 30_000)])
    words = ["data=text", f"data.source.path={file}", "task.sample_tokens=20"]
    return [*words, *(("train.batch_size=8", "model.width=64", "model.ngram_rows=512") if job.small else ())]


def kernels(job: Job) -> str:
    """That torch takes cuDNN's LSTM and a fused attention, by its own trace."""
    for recipe, wanted in (
        ("lstm_text", ("aten::_cudnn_rnn",)),
        ("transformer_text", ("_flash_attention", "_cudnn_attention")),
    ):
        profile = ["debug.profile=true", "train.steps=15"]
        job.train(recipe, f"recipe={recipe}", *text_words(job), *profile)
        with gzip.open(job.folder / recipe / "profile/trace-rank0.json.gz") as file:
            names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
        taken = sorted(name for name in names if any(part in name for part in wanted))
        job.figure(recipe, taken)
        need(bool(taken), f"{recipe}: its trace holds none of {', '.join(wanted)}")
    return "cuDNN's LSTM and a fused attention are taken"


def sanitizer(job: Job) -> str:
    """Both paths of the data: resident, and copied ahead on a stream of its own."""
    for resident in ("true", "false"):
        words = ["recipe=cnn_cifar10", "data=shapes", f"data.resident={resident}", *FEW_IMAGES]
        name = f"resident-{resident}"
        training = job.train(name, *words, f"train.steps={job.pick(30, 4)}", TORCH_CUDA_SANITIZER="1")
        need("race" not in training.ran.said.lower(), f"{name}: a race between streams, see {name}.err")
    return "no race between streams"


def prove(job: Job) -> str:
    return proved(job)


def proved(job: Job, *more: str) -> str:
    kills = job.pick(3, 1)
    words = ["recipe=cnn_cifar10", "data=shapes", "device=cuda", "deterministic=true", *FEW_IMAGES]
    words += ["ranks=1", f"kills={kills}", "moments=1", f"train.steps={job.pick(200, 12)}"]
    job.run("prove", "-m", "ddptrain", "prove", "resume", *words, *more)
    return f"killed {kills} times, it ends with the same bits"


def two_thousand(job: Job) -> str:
    return speedrun(job)


def max_autotune(job: Job) -> str:
    return speedrun(job, "compile=max-autotune")


def speedrun(job: Job, *more: str) -> str:
    """The work of the speed recipe, 243 steps of 1,536, without CIFAR-10."""
    sizes = ["data.source.train=50000", "data.source.valid=10000", "log.every=50"]
    if job.small:
        sizes = ["model.width=8", "optim.head_lr=104", "optim.bias_lr=11", "train.batch_size=64"]
        sizes += ["data.source.train=512", "data.source.valid=64", "train.steps=4", "log.every=2"]
        sizes += ["data.source.seed=0", "train.eval_batch_size=64"]
    training = job.train("speedrun", "recipe=speedrun_cifar10", "data=shapes", *sizes, *more)
    job.figure("speed", speed(training))
    accuracy = training.valid[-1]["accuracy"]
    rates = [float(rate.replace(",", "")) for rate in re.findall(r"([\d.,]+) samples/s", training.ran.said)]
    job.figure("samples_per_s_of_log_lines", rates)
    need(job.small or accuracy > 0.9, f"accuracy {accuracy}; on a CPU, at an eighth of the width, 1.0")
    seconds = f", 373,248 samples in {373_248 / rates[-1]:.2f} s" if rates and not job.small else ""
    return f"accuracy {accuracy:.4f}{seconds}"


def graphs_accumulation(job: Job) -> str:
    words = ["recipe=cnn_cifar10", "data=shapes", *FEW_IMAGES, "train.micro_batch=16"]
    return _with_graphs(job, [*words, "train.steps=12", "log.every=1"])


def graphs_text(job: Job) -> str:
    """A state that is carried from batch to batch, between evaluations of another size."""
    words = ["recipe=lstm_text", *text_words(job), "train.steps=12", "train.eval_every=4", "log.every=1"]
    return _with_graphs(job, words)


def _with_graphs(job: Job, words: Sequence[str]) -> str:
    """CUDA graphs must train what eager does, or be refused in the user's words."""
    eager = job.train("eager", *words, "precision=fp32")
    line = [*words, "precision=fp32", "compile=reduce-overhead", "device=cuda", "run.dir=graphs"]
    ran = job.run("graphs", "-m", "ddptrain", *line, code=None)
    if ran.code == 2:
        job.figure("refused", ran.said[-500:])
        need("compile" in ran.said, "refused with exit code 2, but the message does not name compile")
        return "refused, with a message that names compile"
    need(ran.code == 0, f"exit code {ran.code}")
    lines = (job.folder / "graphs/metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, lines) if row["split"] == "train"]
    most = check_same(losses, eager.losses)
    job.figure("apart", most)
    return f"losses differ from eager ones by {most:.1e}"


def shared_gpu(job: Job) -> str:
    """Two ranks on one GPU, over gloo, train what one does."""
    words = ["recipe=cnn_cifar10", "data=shapes", *FEW_IMAGES, "precision=fp32", "log.every=1"]
    words += [f"train.steps={job.pick(20, 4)}", "device=cuda:0"]
    alone = job.train("alone", *words)
    both = job.train("both", "--nproc-per-node=2", *words)
    need("gloo" in both.ran.said, "the log does not say gloo")
    return _same(job, both, alone)


def _same(job: Job, ours: Trained, theirs: Trained) -> str:
    most = check_same(ours.losses, theirs.losses)
    job.figure("apart", most)
    return f"losses differ from one rank's by {most:.1e}"


def nccl(job: Job) -> str:
    words = ["recipe=cnn_cifar10", "data=shapes", "precision=fp32", "log.every=1", *FEW_IMAGES]
    words += [f"train.steps={job.pick(20, 6)}"]
    alone = job.train("alone", *words, "strategy=single")
    every = f"train.verify_every={job.pick(10, 2)}"
    both = job.train("both", "--nproc-per-node=2", *words, every)
    need("nccl" in both.ran.said, "the log does not say nccl")
    job.figure("speed", speed(both))
    return _same(job, both, alone)


def dp(job: Job) -> str:
    words = ["recipe=cnn_cifar10", "data=shapes", "log.every=1", *FEW_IMAGES]
    words += [f"train.steps={job.pick(20, 4)}", "precision=fp32"]
    alone = job.train("alone", *words, "strategy=single")
    return _same(job, job.train("dp", *words, "strategy=dp"), alone)


def bench(job: Job) -> str:
    said = [_benched(job, *words) for words in _recipes(job)]
    return "; ".join(said)


def _recipes(job: Job) -> Iterator[list[str]]:
    yield ["recipe=cnn_cifar10", "data=shapes"]
    if not job.small:
        yield ["recipe=lstm_text", *text_words(job)]
        yield ["recipe=yolo_shapes", "try=channels_last=false;precision=bf16;compile=default"]


def bench_ddp(job: Job) -> str:
    return _benched(job, "recipe=mobilenet_cifar10", "data=shapes", "ddp=true")


def _benched(job: Job, *words: str) -> str:
    name = words[0].removeprefix("recipe=")
    line = [*words, "device=cuda"]
    if job.small:
        line += ["steps=2", "rounds=3", "data.source.train=256", "train.batch_size=16"]
        line += ["try=strategy.bucket_cap_mb=5" if "ddp=true" in words else "try=precision=fp32"]
    ran = job.run(name, "-m", "ddptrain", "bench", *line)
    fastest = [line for line in ran.out.splitlines() if "python -m ddptrain" in line]
    job.figure(name, ran.out)
    need(bool(fastest), f"{name}: no line says which command is the fastest")
    return f"{name}: {fastest[-1].strip()}"


def _falls(training: Trained, job: Job) -> str:
    """A loss that has fallen, by the median of its first and last three."""
    first, last = statistics.median(training.losses[:3]), statistics.median(training.losses[-3:])
    if not job.small and not last < first:
        raise Failed(f"the loss has not fallen: {first:.3f} at first, {last:.3f} at last")
    return f"loss {training.losses[0]:.3f} to {training.losses[-1]:.3f}"
