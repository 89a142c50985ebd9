"""Accuracy of recipe=finetune on small sets of pictures, beside a hand-written torchvision loop.

    python benchmarks/finetune.py                              # a Markdown table, in some 40 minutes
    python benchmarks/finetune.py --write docs/finetuning.md   # and into that file
    python benchmarks/finetune.py --tasks four --seeds 0       # a quick look

Every task has two sets of pictures in class folders: one on which a model is trained first, and a small one
with other classes. On the small one both loops train a ResNet-18 for the same number of steps, from random
weights and from those of the first set; each figure is the mean accuracy over seeds, after the last step.
"""

import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import made_with, publish, table_parser
from PIL import Image, ImageDraw
from torch.nn import functional
from torch.utils.data import DataLoader
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

NAME = "finetune"
"""Of the markers."""
BATCH, RATE, DECAY, SMOOTHING, WARMUP = 32, 5e-4, 0.05, 0.1, 0.1
"""As in conf/recipe/finetune.yaml."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SHAPES = ("disc", "ring", "square", "frame", "triangle", "cross", "bar", "moon", "star", "arrow")
COLOURS = {
    "red": (200, 50, 45), "green": (45, 175, 65), "blue": (55, 75, 205), "yellow": (220, 200, 55),
    "white": (235, 235, 235), "violet": (150, 60, 170),
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """Two sets, and how long they are trained on."""

    title: str
    side: int
    """Pixels of the model's input."""
    epochs: int
    """On the small set."""
    first_epochs: int
    make: Callable[[Path], None]
    """Writes ``first`` and ``small``, each with train and val."""


def main() -> None:
    parser = table_parser(__doc__, NAME)
    parser.add_argument("--tasks", default=",".join(TASKS), help="(%(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="(%(default)s)")
    arguments = parser.parse_args()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    lines = ["| set | start | hand-written loop | `recipe=finetune` |", "|---|---|---:|---:|"]
    for name in arguments.tasks.split(","):
        with tempfile.TemporaryDirectory() as folder:
            lines += measured(TASKS[name], Path(folder), seeds)
    note = (
        f"Accuracy on pictures that were held out, the mean of {len(seeds)} seeds (and the lowest and"
        f" highest), after the last step. Both loops: ResNet-18, AdamW at {RATE:g}, batches of {BATCH},"
        " RandomResizedCrop of half the area or more, mirror images (not for digits), label smoothing, the"
        f" same number of steps; {made_with('torch', 'torchvision')}"
    )
    publish("\n".join([*lines, "", note]), NAME, arguments.write)


def measured(task: Task, folder: Path, seeds: Sequence[int]) -> list[str]:
    """The table's lines of a task."""
    task.make(folder)
    whole = trained(task, folder / "first", folder / "run-first", "null", 0, task.first_epochs)
    print(f"{task.title}: first set {whole:.4f}", file=sys.stderr, flush=True)
    shares: dict[tuple[str, str], list[float]] = defaultdict(list)
    starts = {"random weights": "null", "the first set's weights": f"{folder}/run-first"}
    for seed in seeds:
        for start, weights in starts.items():
            run = folder / f"run-{seed}-{len(weights)}"
            ours = trained(task, folder / "small", run, weights, seed, task.epochs)
            theirs = by_hand(
                task, folder / "small", folder / "run-first" if weights != "null" else None, seed
            )
            shares[start, "ours"].append(ours)
            shares[start, "hand"].append(theirs)
            print(f"{task.title}, {start}, seed {seed}: {theirs:.4f} {ours:.4f}", file=sys.stderr, flush=True)
    cells = {key: f"{100 * statistics.mean(v):.1f} % ({100 * min(v):.1f} to {100 * max(v):.1f})"
             for key, v in shares.items()}  # fmt: skip
    return [
        f"| {task.title} | {start} | {cells[start, 'hand']} | {cells[start, 'ours']} |" for start in starts
    ]


def trained(task: Task, root: Path, run: Path, weights: str, seed: int, epochs: int) -> float:
    """The accuracy that ``recipe=finetune`` has after its last step."""
    words = [
        *("recipe=finetune", f"data.root={root}", f"data.source.size={task.side}", "model.name=resnet18"),
        *(
            f"init.weights={weights}",
            f"seed={seed}",
            f"train.epochs={epochs}",
            f"run.dir={run}",
            "device=cpu",
        ),
        *("observers=[]", "train.eval_every=100000", f"train.batch_size={BATCH}"),
        *(["augment.transforms.horizontal_flip=null"] if task.side == 32 else []),
    ]
    done = subprocess.run([sys.executable, "-m", "ddptrain", *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}: stopped:\n{done.stderr}")
    return float(json.loads((run / "summary.json").read_text())["metrics"]["accuracy"])


def by_hand(task: Task, root: Path, first: Path | None, seed: int) -> float:
    """The same training, as torchvision's users write it."""
    torch.manual_seed(seed)
    flip = [] if task.side == 32 else [v2.RandomHorizontalFlip()]
    as_input = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    crop = v2.RandomResizedCrop(task.side, scale=(0.5, 1.0), antialias=True)
    train = ImageFolder(str(root / "train"), v2.Compose([crop, *flip, *as_input]))
    middle = [v2.Resize(task.side, antialias=True), v2.CenterCrop(task.side)]
    valid = ImageFolder(str(root / "val"), v2.Compose([*middle, *as_input]))
    model = models.resnet18(num_classes=len(train.classes)).to(memory_format=torch.channels_last)
    if first is not None:
        saved = torch.load(next((first / "checkpoints").glob("step-*/state.pt")), weights_only=True)["model"]
        model.load_state_dict({k: v for k, v in saved.items() if not k.startswith("fc.")}, strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY)
    steps = math.ceil(task.epochs * len(train) / BATCH)
    warmup = round(WARMUP * steps)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (step + 1) / (warmup + 1) if step < warmup
        else (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2,
    )  # fmt: skip
    for images, labels in _endless(train, steps):
        loss = functional.cross_entropy(model(images), labels, label_smoothing=SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(images).argmax(1) == labels).sum()) for images, labels in DataLoader(valid, 128)
        )
    return right / len(valid)


def _endless(train: ImageFolder, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    done = 0
    while True:
        for images, labels in DataLoader(train, BATCH, shuffle=True, drop_last=True):
            if done == steps:
                return
            yield images.contiguous(memory_format=torch.channels_last), labels
            done += 1


def draw_pictures(folder: Path, kinds: Mapping[str, tuple[str, str]], count: int, seed: int) -> None:
    """``count`` JPEGs of each kind (a shape and a colour): somewhere, turned and of any size, over noise and
    lines."""
    for name, (shape, colour) in kinds.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            dice = random.Random(f"{seed} {name} {i}")
            noise = np.random.default_rng(dice.getrandbits(32))
            width, height = dice.randint(90, 160), dice.randint(90, 160)
            picture = Image.fromarray(noise.integers(0, 150, (height, width, 3), dtype=np.uint8))
            draw = ImageDraw.Draw(picture)
            for _ in range(4):
                ends = [(dice.randint(0, width), dice.randint(0, height)) for _ in range(2)]
                draw.line(ends, tuple(dice.randint(0, 255) for _ in range(3)), 3)
            side = dice.randint(34, 64)
            tint = tuple(max(0, min(255, level + dice.randint(-35, 35))) for level in COLOURS[colour])
            stamp = Image.new("L", (100, 100))
            _shape(ImageDraw.Draw(stamp), shape)
            stamp = stamp.rotate(dice.uniform(-25, 25), Image.Resampling.BILINEAR).resize((side, side))
            place = dice.randint(0, width - side), dice.randint(0, height - side)
            picture.paste(Image.new("RGB", (side, side), tint), place, stamp)
            picture.save(folder / name / f"{i:04}.jpg", quality=85)


def _shape(draw: ImageDraw.ImageDraw, name: str) -> None:
    """White, on a black square of 100 pixels."""
    if name in ("disc", "ring", "moon"):
        draw.ellipse((8, 8, 92, 92), 255)
        inner = {"ring": (30, 30, 70, 70), "moon": (30, 4, 98, 84)}.get(name)
        if inner:
            draw.ellipse(inner, 0)
    elif name in ("square", "frame", "bar"):
        draw.rectangle((12, 38, 88, 62) if name == "bar" else (14, 14, 86, 86), 255)
        if name == "frame":
            draw.rectangle((34, 34, 66, 66), 0)
    elif name == "cross":
        draw.rectangle((40, 8, 60, 92), 255)
        draw.rectangle((8, 40, 92, 60), 255)
    elif name == "triangle":
        draw.polygon([(50, 8), (92, 88), (8, 88)], 255)
    elif name == "arrow":
        draw.polygon([(50, 6), (90, 50), (62, 50), (62, 94), (38, 94), (38, 50), (10, 50)], 255)
    else:
        turns = [
            (math.sin(k * math.pi / 5), math.cos(k * math.pi / 5), 46 if k % 2 == 0 else 19)
            for k in range(10)
        ]
        draw.polygon([(50 + r * x, 50 - r * y) for x, y, r in turns], 255)


def _kinds(shapes: Sequence[str], colours: Sequence[str]) -> dict[str, tuple[str, str]]:
    return {f"{colour}-{shape}": (shape, colour) for shape in shapes for colour in colours}


def _sets(folder: Path, small: Mapping[str, tuple[str, str]], count: int) -> None:
    first = {name: kind for name, kind in _kinds(SHAPES, list(COLOURS)).items() if name not in small}
    for part, many, seed in (("train", 60, 1), ("val", 5, 2)):
        draw_pictures(folder / "first" / part, dict(list(first.items())[:30]), many, seed)
    draw_pictures(folder / "small" / "train", small, count, 3)
    draw_pictures(folder / "small" / "val", small, max(20, 600 // len(small)), 4)


def four(folder: Path) -> None:
    """270 pictures of four classes to train on, nearly."""
    _sets(folder, _kinds(SHAPES[5:7], ("red", "blue")), 67)


def thirty(folder: Path) -> None:
    """Ten pictures of each class."""
    _sets(folder, _kinds(SHAPES[5:], list(COLOURS)), 10)


def digits(folder: Path) -> None:
    """scikit-learn's: 0 to 4 first, then 20 pictures of each of 5 to 9; all others of these are held out."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    seen: dict[int, int] = defaultdict(int)
    for pixels, label in zip(digits.images, digits.target.tolist(), strict=True):
        place, seen[label] = seen[label], seen[label] + 1
        part = ("val" if place % 10 == 9 else "train") if label < 5 else ("train" if place < 20 else "val")
        target = folder / ("first" if label < 5 else "small") / part / str(label)
        target.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15).astype(np.uint8)).convert("RGB").save(target / f"{place}.png")


TASKS = {
    "four": Task("268 pictures of 4 classes", 64, 20, 12, four),
    "thirty": Task("10 pictures of each of 30 classes", 64, 20, 12, thirty),
    "digits": Task("20 of each of the digits 5 to 9", 32, 30, 12, digits),
}

if __name__ == "__main__":
    main()
