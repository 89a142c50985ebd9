"""A notebook, executed in a real kernel."""

import asyncio
import json
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from marked import MARK, living
from running import stopped_steps
from shell import ddptrain
from torchvision.transforms.v2.functional import to_pil_image

from ddptrain.data.images.digits import Digits

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

TRAIN = """
import ddptrain
words = ["recipe=cnn_digits", "device=cpu", "train.epochs=20", "log.every=5"]
run = ddptrain.train(*words, ranks=2)
run
"""
GO_ON = """
run = ddptrain.train(*words, f"run.dir={run.folder}", ranks=2)
import sys
print("torch" in sys.modules)
"""
PREDICT = """
model = ddptrain.load(run)
scores = model.module(model.preprocess("digit.png"))
best = int(scores.argmax())
print("answer", model.classes[best], float(scores.softmax(dim=1)[0, best]))
"""
PLOT = """
import matplotlib.pyplot as plt
plt.plot(*run.curves.points("accuracy"))
plt.show()
"""


def notebook(folder: Path, *cells: str) -> Any:
    """A client for these cells, with its kernel in ``folder``."""
    written = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells])
    place = {"metadata": {"path": str(folder)}}
    return nbclient.NotebookClient(written, timeout=200, kernel_name="python3", resources=place)


async def execute(client: Any, interrupted: int, when: Callable[[], bool], left: Callable[[], Any]) -> Any:
    """Run all cells, one of them interrupted once ``when`` holds; what ``left`` gives after that one."""
    found = None
    async with client.async_setup_kernel():
        for i, cell in enumerate(client.nb.cells):
            done = asyncio.ensure_future(client.async_execute_cell(cell, i))
            while i == interrupted and not when():
                assert not done.done(), cell.outputs
                await asyncio.sleep(0.05)
            if i == interrupted:
                await client.km.interrupt_kernel()
            await done
            if i == interrupted:
                found = left()
    return found


def said(client: Any, cell: int) -> str:
    """What a cell has printed, and what it shows."""
    outputs = client.nb.cells[cell].outputs
    assert not [output for output in outputs if output.output_type == "error"]
    texts = [output.get("text") or output["data"]["text/plain"] for output in outputs]
    return "\n".join(text.strip() for text in texts)


@pytest.mark.long
def test_train_interrupt_go_on_load_predict_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pixels = Digits().open(tmp_path).valid.images(torch.tensor([3]))[0]
    to_pil_image(pixels.permute(2, 0, 1)).save(tmp_path / "digit.png")
    client = notebook(tmp_path, TRAIN, GO_ON, PREDICT, PLOT)

    def trains() -> bool:
        return any(path.stat().st_size for path in tmp_path.glob("runs/*/*/metrics.jsonl"))

    left = asyncio.run(execute(client, 0, trains, lambda: living(mark)))
    assert len(left) == 1  # the kernel
    assert "ipykernel" in next(iter(left.values()))
    assert living(mark) == {}

    first, second, third, _ = (said(client, cell) for cell in range(4))
    (run,) = tmp_path.glob("runs/cnn_digits/*")
    (step,) = stopped_steps(first.partition("<Run")[0])
    assert f"<Run {run}: stopped at step {step}" in first
    (live,) = (o for o in client.nb.cells[0].outputs if o.output_type == "display_data")
    assert re.match(r"step \d+/\d+  epoch", live["data"]["text/plain"])  # the last one, in place
    assert len(re.findall(r"^step ", first, re.MULTILINE)) == 1
    assert f"resumed    {run}/checkpoints/step-{step}" in second
    assert second.endswith("False"), "no torch in the kernel before load"
    assert json.loads((run / "summary.json").read_text())["outcome"] == "done"

    words = f"predict run={run} checkpoint=best source=digit.png top=1"
    asked = ddptrain(tmp_path, words)
    assert asked.code == 0, asked.err
    _, label, share = (tmp_path / "predictions/predictions.csv").read_text().split()[-1].split(",")
    _, answer, probability = third.split()
    assert answer == label
    assert f"{float(probability):.6g}" == share
    assert any("image/png" in output.get("data", {}) for output in client.nb.cells[3].outputs)


EXAMPLE = Path(__file__).parents[2] / "docs/examples/spirals.ipynb"
TRAINS, GOES_ON = 3, 5
"""Its cells."""


def executed(home: Path, interrupted: int = -1) -> list[tuple[int, float]]:
    """The steps and losses that the example's notebook leaves, one of its cells interrupted as soon as it has
    written some."""
    home.mkdir()
    metrics = home / "runs/spirals/metrics.jsonl"
    written, place = nbformat.read(EXAMPLE, 4), {"metadata": {"path": str(home)}}
    client = nbclient.NotebookClient(written, timeout=200, resources=place)
    left = asyncio.run(
        execute(
            client,
            interrupted,
            lambda: metrics.exists() and metrics.stat().st_size > 0,
            lambda: living(os.environ[MARK]),
        )
    )
    assert living(os.environ[MARK]) == {}
    assert left is None or len(left) == 1, "the kernel"
    assert ("done" if left is None else "stopped") in said(client, TRAINS)
    assert "'accuracy': 0.99" in said(client, GOES_ON)
    assert "image/png" in client.nb.cells[-1].outputs[-1]["data"]
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


@pytest.mark.long
def test_the_example_trains_what_its_cells_define_and_goes_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, uuid.uuid4().hex)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert executed(tmp_path / "whole") == executed(tmp_path / "stopped", interrupted=TRAINS)
