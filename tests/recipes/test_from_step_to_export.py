"""Any classifier, from its first step to plain onnxruntime: trained, saved, resumed, exported."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from shell import ddptrain

TORCHVISION = [
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet"),
    *("inception_v3", "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_y_400mf"),
    *("resnet18", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t", "swin_v2_t"),
    "vit_b_16",
]
TIMM = [
    *("convnext_atto", "deit_tiny_patch16_224", "efficientnet_b0", "ghostnet_100", "mobilenetv4_conv_small"),
    *("regnety_002", "resnet10t", "resnetv2_50", "swin_tiny_patch4_window7_224", "vit_tiny_patch16_224"),
]
SIDES = {"maxvit_t": 224, "swin_tiny_patch4_window7_224": 224, "inception_v3": 96, "googlenet": 96}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs of two kinds and many sizes."""
    root, draw = tmp_path_factory.mktemp("pictures"), np.random.default_rng(3)
    for kind, colour in (("blue", (30, 60, 200)), ("orange", (240, 140, 20))):
        (root / kind).mkdir()
        for i in range(11):
            size = tuple(draw.integers(70, 300, 2))
            noise = draw.normal(colour, 40, (*size, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(noise).save(root / kind / f"{i}.jpg")
    return root


@pytest.mark.long
def test_a_small_one(tmp_path: Path, pictures: Path) -> None:
    check_path(tmp_path, pictures, "torchvision", "mobilenet_v3_small")


@pytest.mark.long
@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvisions(tmp_path: Path, pictures: Path, name: str) -> None:
    check_path(tmp_path, pictures, "torchvision", name)


@pytest.mark.long
@pytest.mark.parametrize("name", TIMM)
def test_timms(tmp_path: Path, pictures: Path, name: str) -> None:
    pytest.importorskip("timm")
    check_path(tmp_path, pictures, "timm", name)


def check_path(home: Path, pictures: Path, library: str, name: str) -> None:
    """The program of docs/finetuning.md, without torch, gives predict's classes, and its probabilities to
    1e-4."""
    words = (
        f"recipe=finetune data.root={pictures} model={library} model.name={name} init.weights=null"
        f" data.source.size={SIDES.get(name, 64)} train.batch_size=4 optim.lr=1e-4 device=cpu run.dir=run"
        " observers=[] data.workers=0"
    )
    for steps in (1, 2):
        done = ddptrain(home, f"{words} train.steps={steps}", **ONE_THREAD)
        assert done.code == 0, done.err
        assert ("resumed    run/checkpoints/step-1" in done.err) == (steps == 2)
    for verb in ("export run=run format=onnx out=model.onnx", f"predict run=run source={pictures} top=2"):
        done = ddptrain(home, verb, **ONE_THREAD)
        assert done.code == 0, done.err
    assert json.loads((home / "model.onnx.json").read_text())["classes"] == ["blue", "orange"]
    page = (Path(__file__).parents[2] / "docs/finetuning.md").read_text()
    (home / "use.py").write_text(page.split("```python\n")[1].split("```")[0])
    with (home / "predictions/predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    said = subprocess.run(
        [sys.executable, "use.py", *(row["file"] for row in rows)],
        cwd=home, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert len(said) == len(rows) == 22
    for line, row in zip(said, rows, strict=True):
        answer, *logits = line.removeprefix(f"{row['file']} ").split()
        shares = np.exp([float(logit) for logit in logits])
        assert answer == row["label_1"] or abs(float(row["probability_1"]) - 0.5) < 1e-4
        assert abs(shares.max() / shares.sum() - float(row["probability_1"])) <= 1e-4
