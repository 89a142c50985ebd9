"""The detector's second head, that leaves an object one box: what it learns, and nothing else changes."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import SAMPLES, detector
from torch import Tensor, nn

from ddptrain.api.recipe import Progress
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.detection.batch import Batch
from ddptrain.data.detection.data import DetectionData
from ddptrain.recipes.detection.detections import without_doubles
from ddptrain.recipes.yolo.assign import Assigned, TaskAligned
from ddptrain.recipes.yolo.detection import Detection
from ddptrain.recipes.yolo.model import Dual, Raw, Yolo, anchors
from ddptrain.recipes.yolo.selector import surroundings

START = Progress(0, 0, 0.0)


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**20), st.integers(0, 6), st.sampled_from([1, 7, 10]))
def test_of_an_objects_anchors_the_best_aligned_learns_it(seed: int, objects: int, most: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    points, strides = anchors(64, 64, torch.device("cpu"))
    corners = torch.rand(2, objects, 2, generator=draw) * 40
    boxes = torch.cat([corners, corners + 4 + torch.rand(2, objects, 2, generator=draw) * 40], dim=2)
    labels = torch.randint(-1, 3, (2, objects), generator=draw)
    reach = torch.rand(2, len(points), 4, generator=draw) * 30
    predicted = torch.cat([points - reach[..., :2], points + reach[..., 2:]], dim=2)
    scores = torch.rand(2, len(points), 3, generator=draw)
    case = (scores, predicted, points, strides, boxes, labels)
    several, one = TaskAligned(most)(*case), TaskAligned(most)(*case, one_to_one=True)
    for i in range(2):
        for j in range(objects):
            its = (several.weight[i] > 0) & (several.target[i] == j)
            learns = ((one.weight[i] > 0) & (one.target[i] == j)).nonzero()[:, 0].tolist()
            if not its.any():
                assert not learns
                continue
            # weights of an object's anchors are shares of its best aligned one
            best = int((several.weight[i] * its).argmax())
            assert learns == [best]
            torch.testing.assert_close(one.weight[i, best], iou(boxes[i, j], predicted[i, best]))


def iou(one: Tensor, other: Tensor) -> Tensor:
    shared = (torch.minimum(one[2:], other[2:]) - torch.maximum(one[:2], other[:2])).clamp(min=0).prod()
    return shared / ((one[2:] - one[:2]).prod() + (other[2:] - other[:2]).prod() - shared)


class Says(nn.Module):
    def __init__(self, outputs: Raw | Dual) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, images: Tensor) -> Raw | Dual:
        return self.outputs


def ready() -> tuple[Detection, DetectionData]:
    task, data = detector(one_to_one=True)
    data.prepare(World(), seed=0)
    return task, data


def first_batch(data: DetectionData) -> Batch:
    return next(data.train_batches(Sampler(SAMPLES, 4, seed=0), range(1)))


def random_raw(seed: int) -> Raw:
    draw = torch.Generator().manual_seed(seed)
    points, strides = anchors(64, 64, torch.device("cpu"))
    distances = torch.randn(4, len(points), 4, 16, generator=draw) * 2
    return Raw(distances, torch.randn(4, len(points), 10, generator=draw) * 2, points, strides)


def test_the_second_heads_classes_are_added_to_the_loss() -> None:
    """Over the weights of the first."""
    task, data = ready()
    batch, many, one = first_batch(data), random_raw(1), random_raw(2)

    class Single:
        def __call__(self, *case: Tensor, one_to_one: bool = False) -> Assigned:
            return TaskAligned()(*case, one_to_one=True)

    single = Detection(lambda **_: nn.Identity(), data, Single())  # type: ignore[arg-type]
    both = task.loss(Says(Dual(many, one)), batch, START)
    first, second = task.loss(Says(many), batch, START), single.loss(Says(one), batch, START)
    classes = 0.5 * second.logs["classes"]
    torch.testing.assert_close(both.sum, first.sum + classes)
    assert torch.equal(torch.as_tensor(both.count), torch.as_tensor(first.count))
    assert both.logs.keys() - first.logs.keys() == {"one_to_one"}
    torch.testing.assert_close(both.logs["one_to_one"], classes)
    assert all(torch.equal(both.logs[name], value) for name, value in first.logs.items())


def test_the_rest_of_the_network_learns_what_it_learns_without() -> None:
    """From the same initial weights, to the bit."""
    task, data = ready()
    batch = first_batch(data)
    networks = []
    for one_to_one in (False, True):
        torch.manual_seed(0)
        network = Yolo(10, one_to_one=one_to_one)
        task.loss(network, batch, START).sum.backward()
        networks.append(network)
    plain, dual = (dict(network.named_parameters()) for network in networks)
    second = {name for name in dual if name.startswith("selector.")}
    assert dual.keys() - second == plain.keys()
    for name, weight in plain.items():
        assert torch.equal(weight, dual[name]), name
        assert torch.equal(gradient(weight), gradient(dual[name])), name
    assert all(gradient(dual[name]).any() for name in second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cell_sees_how_far_it_lies_above_those_around_it(dtype: torch.dtype) -> None:
    """On its own map, a finer one and a coarser one; against loops."""
    draw = torch.Generator().manual_seed(1)
    logits = [(torch.randn(2, 3, side, 2 * side, generator=draw) * 5).to(dtype) for side in (8, 4, 2)]
    for i, own in enumerate(logits):
        maps = surroundings(logits, i).split(3, dim=1)
        others = [(own, 1), (own, 2), *((logits[j], 1) for j in (i - 1, i + 1) if 0 <= j < 3)]
        assert torch.equal(maps[0], own.sigmoid())
        for seen, (other, reach) in zip(maps[1:], others, strict=True):
            scale = other.shape[2] / own.shape[2]
            for y, x in product(range(own.shape[2]), range(own.shape[3])):
                rows, columns = (
                    slice(max(0, int(scale * at) - reach), int(scale * at + max(1, scale) + reach))
                    for at in (y, x)
                )
                above = own[:, :, y, x] - other[:, :, rows, columns].amax((2, 3))
                assert torch.equal(seen[:, :, y, x], above.clamp(-8, 8))


def gradient(weight: nn.Parameter) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def test_one_state_answers_with_either_head() -> None:
    """In evaluation the first head's is computed, and nothing else where it is asked."""
    _, data = ready()
    images = next(data.valid_batches([range(3)])).images
    torch.manual_seed(0)
    dual, many = Yolo(10, one_to_one=True), Yolo(10, one_to_one=True, head="one_to_many")
    many.load_state_dict(dual.state_dict())
    plain = Yolo(10)
    plain.load_state_dict(dual.state_dict(), strict=False)
    one_raw, many_raw, plain_raw = (network.eval()(images) for network in (dual, many, plain))
    assert isinstance(one_raw, Dual)
    assert one_raw.one_to_many is None
    assert all(torch.equal(a, b) for a, b in zip(many_raw, plain_raw, strict=True))
    assert not torch.equal(one_raw.one_to_one.classes, many_raw.classes)
    assert torch.equal(one_raw.one_to_one.distances, many_raw.distances)
    for network in (dual, many):
        learning = network.train()(images)
        assert isinstance(learning, Dual)
        assert learning.one_to_many is not None


def evaluated(outputs: Raw | Dual) -> Tensor:
    """Rows of picture, box, score and class."""
    task, data = ready()
    rows: Any = task.evaluate(Says(outputs), next(data.valid_batches([range(4)])))["detections"]
    answer: Tensor = rows.values
    return answer


def test_its_answers_are_taken_as_they_are() -> None:
    """Where a second suppression would remove one of two alike."""
    raw = random_raw(3)
    alike = raw._replace(classes=torch.full_like(raw.classes, -20.0))
    alike.classes[:, :2, 5] = torch.tensor([3.0, 2.0])
    alike.distances[:, 1] = alike.distances[:, 0]
    alike = alike._replace(points=raw.points.clone())
    alike.points[1] = alike.points[0]
    sure = [rows[rows[:, 5] > 0.5] for rows in (evaluated(alike), evaluated(Dual(None, alike)))]
    assert [len(rows) for rows in sure] == [4, 8]
    best = sure[1][sure[1][:, 0] == 0]
    torch.testing.assert_close(best[:, 5], torch.tensor([3.0, 2.0]).sigmoid())
    torch.testing.assert_close(best[0, 1:5], best[1, 1:5])


def test_an_overlap_of_one_leaves_all() -> None:
    boxes, scores = torch.tensor([[1.0, 1.0, 5.0, 5.0]]).expand(9, 4), torch.arange(9) * 0.7 % 1
    labels = torch.zeros(9, dtype=torch.int64)
    order = scores.argsort(descending=True).tolist()
    assert without_doubles(boxes, scores, labels, 0.99).tolist() == order[:1]
    assert without_doubles(boxes, scores, labels, 1.0).tolist() == order
