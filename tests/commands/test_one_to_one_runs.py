"""A detector with a head that needs no suppression of doubles, from its training to a file."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from detector import ONE_THREAD, SHAPES
from shell import ddptrain, refusal

from ddptrain.engine.load_model import fit_model
from ddptrain.engine.saved_checkpoint import read, unpack
from ddptrain.recipes.yolo.boxes import decoded
from ddptrain.recipes.yolo.model import Dual, Yolo

LONGER = SHAPES.replace("train.steps=40", "train.steps=200")
"""Until both heads find something."""
LAST = "checkpoints/step-200"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one_to_one")
    done = ddptrain(folder, f"{LONGER} model.one_to_one=true run.dir=run", **ONE_THREAD)
    assert done.code == 0, done.err
    return folder / "run"


def judged(run: Path, words: str = "") -> dict[str, float]:
    done = ddptrain(run.parent, f"evaluate run=run checkpoint=last {words}", **ONE_THREAD)
    assert done.code == 0, done.err
    metrics: dict[str, float] = json.loads(done.out)
    return metrics


@pytest.mark.long
def test_either_head_is_judged(run: Path) -> None:
    [*_, last] = (run / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(last)
    assert metrics["AR"] > 0
    one, many = judged(run), judged(run, "model.head=one_to_many")
    assert one["AR"] == metrics["AR"]
    assert many["AR"] > 0
    assert many["AR"] != one["AR"]
    lost = refusal(run.parent, "evaluate run=run model.one_to_one=false", **ONE_THREAD)
    assert "selector." in lost


@pytest.mark.long
def test_a_file_lists_its_answers_without_suppression(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    words = f"export run=run checkpoint=last format=onnx nms=true score=0.001 most=50 out={file}"
    done = ddptrain(run.parent, words, **ONE_THREAD)
    assert done.code == 0, done.err
    kinds = {node.op_type for node in onnx.load(str(file)).graph.node}
    assert "TopK" in kinds
    assert "NonMaxSuppression" not in kinds
    assert json.loads((tmp_path / "model.onnx.json").read_text())["overlap"] == 1
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    [[rows]] = session.run(None, {"images": images.numpy()})
    model = Yolo(10, one_to_one=True).eval()
    fit_model(model, unpack(read(run / LAST))["average"]["weights"], "the run")
    with torch.no_grad():
        outputs = model(images)
    assert isinstance(outputs, Dual)
    scores, boxes = outputs.one_to_one.classes[0].sigmoid(), decoded(outputs.one_to_one)[0]
    best = scores.flatten().topk(50).values
    assert best[-1] > 0.001
    np.testing.assert_allclose(rows[:, 4], best, rtol=1e-3, atol=1e-5)
    for row in rows:  # rounding decides the order of nearly equal scores
        alike = ((scores[:, int(row[5])] - row[4]).abs() < 1e-4).nonzero()[:, 0]
        assert (boxes[alike] - torch.from_numpy(row[:4])).abs().amax(1).min() < 1e-2
