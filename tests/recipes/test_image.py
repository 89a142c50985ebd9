"""Image classification counts every picture once, in its cell."""

import pytest
import torch
from torch import Tensor, nn

from ddptrain.api.world import World
from ddptrain.data.images.augment import Augment
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.shapes import Shapes
from ddptrain.recipes import image
from ddptrain.recipes.image import ImageClassification

NORMAL = {"mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0]}


class Said(nn.Module):
    """Answers with the pictures' first numbers."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)[:, :7]


def test_the_confusion_matrix_is_a_loops() -> None:
    data = ImageData(Shapes(), Augment())
    data.load_metadata({"classes": list("abcdefg"), "shape": (32, 32, 3), **NORMAL}, World())
    task = ImageClassification(nn.Identity, data)
    draw = torch.Generator().manual_seed(0)
    images, labels = torch.randn(500, 1, 3, 3, generator=draw), torch.randint(0, 5, (500,), generator=draw)
    images[:, 0, 0, 1] = -9.0  # labels 5 and 6 never come, 1 is never said
    sums = task.evaluate(Said(), (images, labels))
    slow = [[0] * 7 for _ in range(7)]
    in_top5 = 0
    for logits, label in zip(Said()(images).tolist(), labels.tolist(), strict=True):
        ranked = sorted(range(7), key=lambda k: -logits[k])
        slow[label][ranked[0]] += 1
        in_top5 += label in ranked[:5]
    assert sums["confusion"].tolist() == slow
    assert sums["confusion"].dtype == torch.int64
    assert int(sums["in_top5"]) == in_top5


def test_many_classes_are_counted_without_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the metrics are those of the matrix."""
    data = ImageData(Shapes(), Augment())
    data.load_metadata({"classes": list("abcdefg"), "shape": (32, 32, 3), **NORMAL}, World())
    task = ImageClassification(nn.Identity, data)
    draw = torch.Generator().manual_seed(0)
    batch = torch.randn(500, 1, 3, 3, generator=draw), torch.randint(0, 5, (500,), generator=draw)
    whole = task.report(task.evaluate(Said(), batch))
    monkeypatch.setattr(image, "_MOST_IN_MATRIX", 6)
    sums = task.evaluate(Said(), batch)
    assert max(value.numel() for value in sums.values()) == 7
    counted = task.report(sums)
    assert counted.metrics == whole.metrics
    assert (list(whole.figures), list(counted.figures)) == (["confusion"], [])


def test_one_answer_for_all_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    data = ImageData(Shapes(), Augment())
    data.load_metadata({"classes": ["cat", "dog"], "shape": (32, 32, 3), **NORMAL}, World())
    task = ImageClassification(nn.Identity, data)
    for matrix, noted in (([[3, 0], [5, 0]], True), ([[3, 0], [0, 5]], False)):
        caplog.clear()
        sums = {"loss": torch.tensor(1.0), "confusion": torch.tensor(matrix), "in_top5": torch.tensor(8)}
        with caplog.at_level("WARNING", logger="ddptrain"):
            task.report(sums)
        assert ("every picture is taken for 'cat'" in caplog.text) == noted
