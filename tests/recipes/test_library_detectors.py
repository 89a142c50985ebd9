"""Detectors of other libraries: the losses and answers are the library's own, of each picture by itself."""

from typing import Any

import pytest
import torch
from scenes import with_statistics
from torch import Tensor
from torchvision.models import get_model

from ddptrain.api import UserError, derive_seed
from ddptrain.api.recipe import Progress
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.detection.augment import DetectionAugment
from ddptrain.data.detection.batch import Batch
from ddptrain.data.detection.data import DetectionData
from ddptrain.data.detection.drawn import DrawnScenes
from ddptrain.recipes.detection.detector import Detector
from ddptrain.recipes.detection.library import LibraryDetection
from ddptrain.recipes.detection.torchvision_detector import DetectorName, torchvision_detector
from ddptrain.run.initial_weights import match

SIDE, SEED, STEP = 96, 3, 5
NAMES = (
    "ssdlite320_mobilenet_v3_large",
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "fasterrcnn_mobilenet_v3_large_fpn",
    "fasterrcnn_resnet50_fpn_v2",
    "fcos_resnet50_fpn",
    "retinanet_resnet50_fpn",
    "retinanet_resnet50_fpn_v2",
    "ssd300_vgg16",
    "fasterrcnn_resnet50_fpn",
)
FAST = NAMES[:2]


@pytest.fixture(scope="module")
def data() -> DetectionData:
    data = DetectionData(DrawnScenes(train=6, valid=5, size=SIDE), DetectionAugment(), size=SIDE)
    data.prepare(World(), seed=SEED)
    return data


@pytest.fixture(scope="module")
def batch(data: DetectionData) -> Batch:
    [batch] = data.train_batches(Sampler(data.train_size, 3, seed=SEED), range(1))
    batch.labels[1] = -1  # a picture of nothing
    return batch


def made(name: str, **arguments: Any) -> Detector:
    torch.manual_seed(0)
    return torchvision_detector(DetectorName(name), num_classes=10, size=SIDE, **arguments)


def willing(name: str) -> Detector:
    """It answers though it has learnt nothing."""
    return made(name, **{"box_score_thresh" if "rcnn" in name else "score_thresh": 0.0})


def own_loss(detector: Detector, image: Tensor, boxes: Tensor, labels: Tensor, id: int) -> dict[str, Tensor]:
    """What the library says of one picture."""
    there = labels >= 0
    detector.detector.transform.torch_choice = lambda sizes: sizes[0]  # it would draw one of one size
    torch.manual_seed(derive_seed(derive_seed(SEED, STEP), id))
    losses: dict[str, Tensor] = detector.detector(
        [image], [{"boxes": boxes[there], "labels": labels[there] + 1}]
    )
    return losses


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[2:])])
def test_a_batchs_loss_is_the_sum_of_its_pictures(name: str, data: DetectionData, batch: Batch) -> None:
    # in float64, so that rounding does not decide which proposals are learnt from
    detector = with_statistics(made(name, frozen_norm=True)).train().double()
    batch = batch._replace(images=batch.images.double(), boxes=batch.boxes.double())
    loss = LibraryDetection(lambda **_: detector, data).loss(detector, batch, Progress(STEP, 0, 0.0))
    assert loss.count == 3
    singles = [
        own_loss(detector, image, boxes, labels, int(id))
        for image, boxes, labels, id in zip(batch.images, batch.boxes, batch.labels, batch.ids, strict=True)
    ]
    assert loss.logs.keys() == singles[0].keys()
    for part, value in loss.logs.items():
        expected = torch.stack([single[part] for single in singles]).sum().float()
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(loss.sum, sum(loss.logs.values()))
    loss.sum.backward()
    missing = [part for part, parameter in detector.named_parameters() if parameter.grad is None]
    assert not missing, "each parameter has a gradient, as DDP needs it"


@pytest.mark.parametrize("name", FAST)
def test_what_is_drawn_for_a_picture_follows_from_the_step(
    name: str, data: DetectionData, batch: Batch
) -> None:
    """And from the picture, but not from what was drawn before."""
    detector = with_statistics(made(name, frozen_norm=True)).train()
    task = LibraryDetection(lambda **_: detector, data)
    first, again, later = (
        float(task.loss(detector, batch, Progress(step, 0, 0.0)).sum.detach()) for step in (1, 1, 2)
    )
    assert first == again
    if "fasterrcnn" in name:  # the others draw nothing
        assert first != later


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[2:])])
def test_an_evaluation_has_the_librarys_answers(name: str, data: DetectionData) -> None:
    detector = willing(name).eval()
    [batch] = data.valid_batches([range(5)])
    task = LibraryDetection(lambda **_: detector, data)
    with torch.no_grad():
        rows = task.evaluate(detector, batch)["detections"].values  # type: ignore[union-attr]
        answers = detector.detector(list(batch.images))
    for i, answer in enumerate(answers):
        own = rows[rows[:, 0] == batch.ids[i]]
        kept = (answer["labels"] > 0) & (answer["scores"] >= 0.001)
        boxes = batch.placed.of(i).back(answer["boxes"][kept])
        assert torch.equal(own[:, 1:5], boxes)
        assert torch.equal(own[:, 5], answer["scores"][kept])
        assert torch.equal(own[:, 6].long() + 1, answer["labels"][kept])
    assert len(rows) > 20


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[2:])])
def test_all_that_an_export_says_holds_the_librarys_answers(name: str, data: DetectionData) -> None:
    detector = willing(name).eval()
    [batch] = data.valid_batches([range(2)])
    with torch.no_grad():
        answers = detector.detector(list(batch.images))
        every = detector.dense(batch.images)
    scale = torch.tensor([SIDE, SIDE, SIDE, SIDE, 1.0])
    for answer, boxes, scores in zip(answers, *every, strict=True):
        assert len(answer["boxes"])
        for box, label, score in zip(answer["boxes"], answer["labels"] - 1, answer["scores"], strict=True):
            if label >= 0:
                own = boxes if boxes.ndim == 2 else boxes[:, label]
                rows = torch.cat([own, scores[:, label, None]], dim=1)
                assert ((rows - torch.cat([box, score[None]])).abs() / scale).amax(1).amin() < 1e-4


def test_an_export_proposes_what_the_library_does(data: DetectionData) -> None:
    """No more: of proposals below the threshold that Faster R-CNN has with a MobileNet."""
    detector = made("fasterrcnn_mobilenet_v3_large_320_fpn", box_score_thresh=0.0, box_nms_thresh=1.0).eval()
    library: Any = detector.detector
    assert library.rpn.score_thresh == 0.05
    [batch] = data.valid_batches([range(2)])
    scores: list[Tensor] = []
    library.roi_heads.register_forward_hook(lambda *of: scores.extend(of[1][1]))  # the proposals
    with torch.no_grad():
        library.rpn.head.cls_logits.bias -= 2.9
        library(list(batch.images))
        said = detector.dense(batch.images)[1]
    for proposals, own in zip(scores, said, strict=True):
        assert 0 < len(proposals) < len(own)
        assert int((own.sum(1) > 0).sum()) == len(proposals)


@pytest.mark.parametrize(
    ("name", "least"), [("fcos_resnet50_fpn", 0.2), ("fasterrcnn_mobilenet_v3_large_fpn", 0.05)]
)
def test_a_score_below_the_librarys_own_is_refused(name: str, least: float, data: DetectionData) -> None:
    detector = made(name)
    task = LibraryDetection(lambda **_: detector, data)
    with pytest.raises(UserError, match=f"score=0.01: this detector lists nothing below {least}"):
        task.predict(detector, "pictures", score=0.01)
    assert willing(name).least_score == 0


def test_words_for_a_list_need_one(data: DetectionData) -> None:
    detector = made(FAST[0])
    task = LibraryDetection(lambda **_: detector, data)
    with pytest.raises(UserError, match=r"most=5: is for nms=true"):
        task.deploy(detector, nms=False, most=5)
    assert task.deploy(detector, score=0.5).metadata["score"] == 0.5


def test_the_librarys_weights_fit() -> None:
    """But for the last layers, which are of other classes."""
    weights = get_model(FAST[1], weights=None, weights_backbone=None, num_classes=91).state_dict()
    matched = match(made(FAST[1], frozen_norm=True), weights, "coco.pth", ())
    assert matched.share > 0.95
    assert not matched.missing
    heads = {line.split()[0] for line in matched.other_size}
    assert heads == {
        f"detector.roi_heads.box_predictor.{layer}.{part}"
        for layer in ("cls_score", "bbox_pred")
        for part in ("weight", "bias")
    }


def test_proposals_are_not_rounded(data: DetectionData, batch: Batch) -> None:
    """Under bf16, which has 8 bits for a coordinate."""
    detector = with_statistics(made(FAST[1], frozen_norm=True)).train()
    detector.detector.rpn.register_forward_hook(lambda *of: proposals.extend(of[2][0]))
    proposals: list[Tensor] = []
    with torch.autocast("cpu", torch.bfloat16):
        loss = LibraryDetection(lambda **_: detector, data).loss(detector, batch, Progress(0, 0, 0.0))
    assert loss.sum.isfinite()
    assert [of.dtype for of in proposals] == [torch.float32] * 3
    assert any(not torch.equal(of, of.bfloat16().float()) for of in proposals)


def test_frozen_norms_of_random_weights_are_refused(data: DetectionData, batch: Batch) -> None:
    detector = made(FAST[0], frozen_norm=True).train()
    with pytest.raises(UserError, match=r"model\.frozen_norm=true: the norms have no statistics"):
        LibraryDetection(lambda **_: detector, data).loss(detector, batch, Progress(0, 0, 0.0))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fasterrcnn_resnet50", "there is no such model. Did you mean fasterrcnn_resnet50_fpn?"),
        ("keypointrcnn_resnet50_fpn", "learns keypoints, which the data do not have"),
        ("*mask*", "matches 2; choose one of them"),
        ("*retina*", "matches 2; choose one of them"),
        ("", "which of these 11?"),
    ],
)
def test_names_are_checked(name: str, said: str) -> None:
    assert said in (DetectorName.problem(name) or "")
    assert set(NAMES) == {name for name in NAMES if DetectorName.problem(name) is None}
