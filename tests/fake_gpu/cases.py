"""Trainings on fake GPUs, one after the other in one process, or in each rank of torchrun's.

    python tests/fake_gpu --gpus=2 python tests/fake_gpu/cases.py FOLDER which ...
    python tests/fake_gpu --gpus=2 torchrun --standalone --nproc-per-node=2 tests/fake_gpu/cases.py FOLDER ...

which: ``quick``, ``long``, ``sharded`` (``sharded:1``: the first of them), ``all``, or numbers of cases of a
whole matrix. ``captured`` before a word or a number: each of them also with its steps captured in a CUDA
graph, and begun again in the middle, which must give the same bits. Prints a line a case: what it was, its
exit code, and the launches of a step: all, and those outside the task's loss and backward pass. Ends with 1
where one crashed, or where `watch` found something in it.
"""

import contextlib
import itertools
import json
import os
import random
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from statistics import median

STEPS = 8
FEW = ["train.batch_size=8", f"train.steps={STEPS}", "train.eval_every=1000", "log.every=1000",
       "checkpoint.every=1000", "observers=[console,jsonl,plots]", "seed=5"]  # fmt: skip
SHAPES = ["data=shapes", "data.source.train=96", "data.source.valid=40"]
TEXT = ["data=text", "data.source.path={folder}/text.txt", "data.window=8", "data.valid_piece=64",
        "data.valid_context=8", "task.sample_tokens=4"]  # fmt: skip
RECIPES = {
    "cnn_cifar10": SHAPES,
    "cnn_digits": [],
    "mobilenet_cifar10": [*SHAPES, "data.augment.cutout=8"],
    "resnet18_cifar10": SHAPES,
    "mobilenet_v3": ["data.root={folder}/pictures", "data.source.size=64", "data.augment.crop=4"],
    "speedrun_cifar10": [*SHAPES, "model.width=8"],
    "lstm_text": [*TEXT, "model.width=16", "model.ngram_rows=64", "model.ngram_width=8"],
    "gru_text": [*TEXT, "model.width=16", "model.ngram_rows=64", "model.ngram_width=8"],
    "rnn_text": [*TEXT, "model.width=16", "model.ngram_rows=64", "model.ngram_width=8"],
    "transformer_text": [*TEXT, "model.width=16", "model.heads=2", "model.layers=2"],
    "transformer_translate": ["data.train=96", "data.valid=40", "model.width=16", "model.heads=2"],
    "yolo_shapes": ["data.source.train=48", "data.source.valid=16", "data.source.size=64"],
}
LOADING = {
    "resident": ["data.resident=true"],
    "files": ["data.resident=false", "data.workers=0"],
    "workers": ["data.resident=false", "data.workers=1"],
}
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
OPTIONS = {
    "plain": [],
    "clip": ["train.clip_norm=1.0"],
    "accumulation": ["train.micro_batch=2"],
    "ema": ["ema.decay=0.9"],
    "skip": ["train.nonfinite=skip"],
    "deterministic": ["deterministic=true"],
}
ALONE = {"single": [], "dp": ["strategy=dp"], "strict": ["strategy=strict", "strategy.shards=4"]}
RANKS = {
    "ddp": [],
    "strict": ["strategy=strict", "strategy.shards=4"],
    "buckets": ["strategy.bucket_cap_mb=0.01", "strategy.gradient_as_bucket_view=false"],
    "static": ["strategy.static_graph=true"],
    "to bf16": ["strategy.compression=bf16"],
    "to fp16": ["strategy.compression=fp16"],
    "batchnorm": ["strategy.sync_batchnorm=true"],
    "verified": ["train.verify_every=2"],
}
SHARDED = {"fsdp": ["strategy=fsdp"], "hsdp": ["strategy=hsdp"]}
THEN = ("", "resume", "evaluate", "predict", "export")
"""What is done with the run afterwards, by one process."""
MAY_WAIT = {"batchnorm"}
"""torch's SyncBatchNorm waits in each layer."""


def matrix(world_size: int) -> list[dict[str, str]]:
    """Every pair of values of any two properties is in it. Chosen out of random cases, always the same."""
    axes = {
        "recipe": list(RECIPES), "loading": list(LOADING), "precision": list(PRECISIONS),
        "option": list(OPTIONS), "strategy": list(RANKS if world_size > 1 else ALONE), "then": list(THEN),
    }  # fmt: skip
    dice = random.Random(world_size)
    wanted = {
        frozenset([(a, x), (b, y)])
        for a, b in itertools.combinations(axes, 2)
        for x, y in itertools.product(axes[a], axes[b])
    }
    cases = []
    while wanted:
        drawn = [{axis: dice.choice(values) for axis, values in axes.items()} for _ in range(50)]
        best = max(drawn, key=lambda case: len(wanted & _pairs(case)))
        wanted -= _pairs(best)
        cases.append(best)
    return cases


def quick(world_size: int) -> list[dict[str, str]]:
    """Each recipe once, and between them each value of the other properties."""
    strategies = list(RANKS if world_size > 1 else ALONE)
    recipes = (
        list(RECIPES)
        if world_size == 1
        else ["cnn_cifar10", "lstm_text", "transformer_text", "yolo_shapes"] * 2
    )
    turns = {
        "loading": LOADING,
        "precision": PRECISIONS,
        "option": OPTIONS,
        "strategy": strategies,
        "then": THEN,
    }
    turning = {axis: itertools.cycle(values) for axis, values in turns.items()}
    return [
        {"recipe": recipe, **{axis: next(values) for axis, values in turning.items()}} for recipe in recipes
    ]


def long(world_size: int) -> list[dict[str, str]]:
    """Until batches of all sizes have been seen, and DDP no longer times itself."""
    alone, ranks = {"option": "plain", "strategy": "single"}, {"option": "clip", "strategy": "ddp"}
    recipes = ["yolo_shapes"] if world_size == 1 else ["cnn_cifar10", "lstm_text", "transformer_text"]
    more = {"loading": "files", "precision": "bf16", "more": "train.steps=48 train.batch_size=4"}
    return [{"recipe": name, **more, **(alone if world_size == 1 else ranks)} for name in recipes]


def sharded(world_size: int) -> list[dict[str, str]]:
    """Weights in parts, gathered block by block; on four ranks hsdp's, of two nodes. With AdamW, of whose
    kind alone torch has fused optimizers for parts."""
    cases = (
        ("transformer_text", "files", "bf16", "clip", "fsdp", "resume"),
        ("cnn_cifar10", "files", "fp16", "skip", "fsdp", "evaluate"),
        ("lstm_text", "files", "fp32", "accumulation", "hsdp", "resume"),
        ("cnn_digits", "workers", "tf32", "ema", "hsdp", ""),
        ("yolo_shapes", "files", "fp32", "deterministic", "fsdp", ""),
        ("transformer_translate", "files", "bf16", "skip", "fsdp", "predict"),
    )
    axes = ("recipe", "loading", "precision", "option", "strategy", "then")
    found = [dict(zip(axes, case, strict=True)) for case in cases]
    return [case for case in found if world_size == 2 or case["strategy"] == "hsdp"]


def words(case: dict[str, str], folder: Path) -> list[str]:
    own = [word.format(folder=folder) for word in RECIPES[case["recipe"]]]
    loading = [] if "_text" in case["recipe"] or "translate" in case["recipe"] else LOADING[case["loading"]]
    strategy = {**ALONE, **RANKS, **SHARDED}[case["strategy"]]
    return [f"recipe={case['recipe']}", "device=cuda", f"precision={case['precision']}", *FEW, *own, *loading,
            *OPTIONS[case["option"]], *strategy, *case.get("more", "").split()]  # fmt: skip


def prepare(folder: Path) -> None:
    """Pictures in class folders, and a text."""
    import torch
    from texts import write_text
    from torchvision.io import write_png

    write_text(folder / "text.txt", words=3000)
    for part, count in (("train", 16), ("val", 8)):
        for label in ("cat", "dog"):
            (folder / "pictures" / part / label).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                picture = torch.randint(
                    0, 256, (3, 72, 80), dtype=torch.uint8, generator=torch.Generator().manual_seed(i)
                )
                write_png(picture, str(folder / "pictures" / part / label / f"{i}.png"))


def run(case: dict[str, str], folder: Path, name: str, *more: str) -> tuple[int, str]:
    """Exit code, and what was said on the way to it."""
    import watch

    trained = [*words(case, folder), *more, f"run.dir={folder}/{name}"]
    watch.strict = case["strategy"] not in MAY_WAIT
    watch.memory = "yolo" not in case["recipe"] or "more" in case
    watch.new_sizes = 2 if "yolo" in case["recipe"] or "accumulation" in case.values() else 0
    told = folder / f"said-{os.environ.get('RANK', '0')}.txt"
    code, said = _said(trained, told)
    then = case.get("then")
    if then == "export" and ("_text" in case["recipe"] or "translate" in case["recipe"]):
        then = "predict"  # they offer no export
    if code or not then:
        return code, said
    asked = {"predict": _asked(case["recipe"], folder, name), "export": ["format=pt2"]}.get(then, [])
    again = (
        [*trained, f"train.steps={STEPS + 4}"] if then == "resume" else [then, f"run={folder}/{name}", *asked]
    )
    code, more_said = _said(again, told)
    return code, said + more_said


def captured(case: dict[str, str], folder: Path, name: str) -> tuple[int, str]:
    """The same training eagerly, captured, and captured again from the checkpoint in its middle. Returns the
    exit code, 1 where a loss or a weight is another one, and what was said."""
    import torch
    import watch

    watch.strict = case["strategy"] not in MAY_WAIT
    watch.memory, told = False, folder / f"said-{os.environ.get('RANK', '0')}.txt"
    middle, end = 6, 12 if "RANK" not in os.environ else 20
    trained = [*words(case, folder), "log.every=1", f"train.steps={end}", f"checkpoint.every={middle}",
               "checkpoint.keep=5"]  # fmt: skip
    runs = {
        "eager": ["compile=off"],
        "graph": ["compile=graph"],
        "again": ["compile=graph", f"run.resume={folder}/{name}-graph/checkpoints/step-{middle}"],
    }
    losses, weights, replays = {}, {}, list[int]()
    for which, more in runs.items():
        run_dir = folder / f"{name}-{which}"
        code, said = _said([*trained, *more, f"run.dir={run_dir}"], told)
        if code:
            return code, said
        replays += watch.replays
        lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        losses[which] = {line["step"]: line.get("loss") for line in lines if line["split"] == "train"}
        state = torch.load(run_dir / f"checkpoints/step-{end}/state.pt", map_location="cpu")
        weights[which] = torch.cat([value.double().flatten() for value in state["model"].values()])
        if which == "graph" and "captured at step" not in said and os.environ.get("RANK", "0") == "0":
            return 1, f"{said}\nno step was captured"
    for which in ("graph", "again"):
        apart = [step for step, loss in losses[which].items() if losses["eager"][step] != loss]
        if apart:
            return 1, f"{which}: other losses than eagerly, in steps {apart}"
        if not torch.equal(weights[which], weights["eager"]):
            return 1, f"{which}: other weights than eagerly"
    watch.replays[:] = replays
    return code, said


def _asked(recipe: str, folder: Path, name: str) -> list[str]:
    """What the task of a recipe is given to predict."""
    if "_text" in recipe:
        return ["prompt=the", "tokens=3"]
    if "translate" in recipe:
        return ["text=3 May 1998"]
    return [f"source={folder}/pictures/val", f"out={folder}/{name}/predictions"]


_ports = itertools.count(10_000 + int(os.environ.get("MASTER_PORT", "0")) % 10_000)
"""The same on all ranks, and below those that a system gives away by itself."""


def _said(words: list[str], told: Path) -> tuple[int, str]:
    """told: a file for what is said, which is left where the process ends in the middle."""
    import emulate
    import torch.distributed as dist

    from ddptrain.verbs.main import main

    if "MASTER_PORT" in os.environ:  # a store of its own, without another training's keys
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        os.environ["MASTER_PORT"] = str(next(_ports))
    with told.open("w", buffering=1) as said:
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                code = main(words)
        except BaseException:
            code = 1
            said.write(traceback.format_exc())
    if dist.is_initialized():  # a run that is refused leaves NCCL's to the end of its process
        dist.destroy_process_group()
    emulate.findings.clear()
    return code, told.read_text()


def _pairs(case: dict[str, str]) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}


def chosen(which: list[str], world_size: int) -> Iterator[tuple[str, dict[str, str], bool]]:
    """Name, case, and whether its steps are captured."""
    for whole_word in which:
        word = whole_word.removeprefix("captured ")
        name, _, first = word.partition(":")
        cases = {"quick": quick, "long": long, "sharded": sharded}.get(name, matrix)(world_size)
        picked = [int(word)] if word.isdigit() else range(int(first or len(cases)))
        for i in picked:
            yield f"{word}-{world_size}-{i}", cases[i], word != whole_word


def go(folder: Path, which: list[str]) -> int:
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if rank == 0 and not (folder / "text.txt").exists():
        prepare(folder)
    crashed = 0
    for name, case, captures in chosen(which, size):
        code, said = captured(case, folder, name) if captures else run(case, folder, name)
        import watch

        settled = watch.steps[watch.SETTLED :]
        launches = [median(of) for of in zip(*((s.whole.launches, s.others) for s in settled), strict=True)]
        replayed = f" {max(watch.replays, default=0)} a replay" if captures else ""
        wrong = code not in (0, 2)
        crashed += wrong
        if rank == 0 or wrong:
            verdict = "CRASHED" if wrong else "refused" if code else "ok"
            what = f"captured {name}" if captures else name
            print(
                f"{verdict} {what} {' / '.join(case.values())}: {code},{replayed} launches {launches}",
                flush=True,
            )
        if code and (rank == 0 or wrong):
            print("    " + "\n    ".join(said.splitlines()[-30 if wrong else -2 :]), flush=True)
        if wrong and size > 1:
            break  # the ranks are no longer together
    return min(crashed, 1)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "support"))
    sys.exit(go(Path(sys.argv[1]), sys.argv[2:]))
