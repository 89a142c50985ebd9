"""Segmentation: pixels counted once, the same training and the same metrics on any number of ranks, masks
written in the pictures' own sizes, and an export that says the same."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from masked import CLASSES, mask_set
from PIL import Image
from shell import ddptrain
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from toy import Fit, weights

from ddptrain.api.recipe import Picture, Progress
from ddptrain.api.world import World
from ddptrain.data.masks.data import MaskData
from ddptrain.data.masks.files import PALETTE
from ddptrain.distributed.watchdog.watchdog import Watchdog
from ddptrain.engine.evaluate import OwnBatches, evaluate
from ddptrain.engine.plan import Plan
from ddptrain.engine.precision import Precision
from ddptrain.errors import ExitCode, UserError
from ddptrain.python.load import load
from ddptrain.recipes.segmentation import Segmentation
from ddptrain.recipes.segmenters import SegmenterName, torchvision_segmenter
from ddptrain.testing import run_ranks
from ddptrain.verbs.main import main

NAMES = [
    "deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large"
]  # fmt: skip
AT = Progress(0, 0, 0.0)
SIZE, TRAIN, VALID = 48, 12, 7


class Tiny(nn.Module):
    """Two convolutions, without BatchNorm, and two heads."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Conv2d(8, num_classes, 1)
        self.aux = nn.Conv2d(8, num_classes, 1)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        features = torch.tanh(self.body(images))
        return {"out": self.head(features), "aux": self.aux(features)}


class Said(nn.Module):
    """Answers with the pictures' own numbers."""

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"out": images}


def opened(root: Path) -> tuple[Segmentation, MaskData]:
    data = MaskData(str(root), SIZE, workers=0)
    data.prepare(World(), 3)
    return Segmentation(Tiny, data), data


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mask_set(tmp_path_factory.mktemp("masks"), TRAIN, VALID)


# -- loss and metrics -------------------------------------------------------------------------------


def test_iou_by_hand(root: Path) -> None:
    """Two batches. Class 2 is never there and never said: it has no IoU. 255 counts nowhere."""
    task, _ = opened(root)
    one_hot = functional.one_hot(torch.tensor([[[0, 1, 1], [0, 0, 1]], [[0, 0, 0], [1, 1, 1]]]), 3)
    said = one_hot.permute(0, 3, 1, 2).float()
    truth = torch.tensor([[[0, 1, 0], [0, 1, 255]], [[0, 0, 255], [1, 255, 1]]])
    sums = [task.evaluate(Said(), (said[i : i + 1], truth[i : i + 1])) for i in (0, 1)]
    added = {name: sum(of[name] for of in sums) for name in sums[0]}
    assert added["confusion"].tolist() == [[4, 1, 0], [1, 3, 0], [0, 0, 0]]  # type: ignore[union-attr]
    metrics = task.report(added).metrics  # type: ignore[arg-type]
    assert metrics["iou/background"] == 4 / 6
    assert metrics["iou/disc"] == 3 / 5
    assert "iou/square" not in metrics
    assert metrics["miou"] == (4 / 6 + 3 / 5) / 2
    assert metrics["pixel_accuracy"] == 7 / 9
    right, wrong = np.log(np.e + 2) - 1, np.log(np.e + 2)
    assert metrics["loss"] == pytest.approx((7 * right + 2 * wrong) / 9)


def test_one_class_is_noted_and_nothing_is_refused(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    task, _ = opened(root)
    for matrix, noted in (
        ([[5, 0, 0], [3, 0, 0], [0, 0, 0]], "every pixel is taken for 'background'"),
        ([[5, 1, 0], [0, 0, 0], [0, 0, 0]], "hold no class but 'background'; 255 does not count"),
        ([[5, 0, 0], [0, 3, 0], [0, 0, 0]], ""),
    ):
        caplog.clear()
        with caplog.at_level("WARNING", logger="ddptrain"):
            task.report({"loss": torch.tensor(1.0), "confusion": torch.tensor(matrix)})
        assert (noted in caplog.text) if noted else not caplog.text
    with pytest.raises(UserError, match="every pixel of the validation masks is 255"):
        task.report({"loss": torch.tensor(0.0), "confusion": torch.zeros(3, 3, dtype=torch.int64)})


def test_the_gradient_is_that_of_a_loop_over_the_pixels_that_count(root: Path) -> None:
    task, _ = opened(root)
    model = Tiny(3).double()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 5, 4, generator=generator, dtype=torch.float64)
    truth = torch.randint(0, 4, (2, 5, 4), generator=generator)
    truth[truth == 3] = 255
    loss = task.loss(model, (images, truth), AT)
    loss.sum.backward()
    assert isinstance(loss.count, Tensor)
    count = int((truth != 255).sum())
    unit = count / float(loss.count)
    assert (count < truth.numel(), unit) == (True, 16.0), "of 20 pixels: the power of two that is near"
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for name, share in (("out", 1.0), ("aux", 0.5)):
        logits = model(images)[name]
        for i, y, x in np.ndindex(2, 5, 4):
            if truth[i, y, x] != 255:
                total = total - share * logits[i, :, y, x].log_softmax(0)[truth[i, y, x]]
    total.backward()
    torch.testing.assert_close(unit * loss.sum, total)
    found = [unit * gradient for gradient in found]
    torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])


# -- ranks ------------------------------------------------------------------------------------------


def test_ranks_and_accumulation_do_not_change_the_weights(root: Path, tmp_path: Path) -> None:
    """Masks differ in how many pixels count, so ranks do: a mean of the ranks' means would be another
    training."""

    def trained(size: int, micro_batch: int | None) -> list[Tensor]:
        def rank(world: World) -> Tensor:
            folder = Path(tempfile.mkdtemp(dir=tmp_path)) if world.is_first else tmp_path / "unused"
            plan = Plan(4, TRAIN, batch_size=6, micro_batch=micro_batch, eval_batch_size=4, seed=3)
            fit = Fit(plan, optim={"_target_": "torch.optim.SGD", "lr": 0.05})
            state, _ = fit.train(*opened(root), world, folder)
            return weights(state)

        return run_ranks(rank, size)

    [expected] = trained(1, None)
    for size, micro_batch in ((1, 4), (2, None), (3, 1)):
        for found in trained(size, micro_batch):
            difference = ((found - expected).norm() / expected.norm()).item()
            assert difference < 1e-5, f"{size} ranks, micro-batches of {micro_batch}: {difference}"


def test_metrics_are_exact_on_any_number_of_ranks_and_those_of_numpy(root: Path) -> None:
    def judged(world: World, batch_size: int) -> dict[str, float]:
        task, data = opened(root)
        torch.manual_seed(5)
        precision = Precision("fp32", world.device)
        batches = OwnBatches(data, data.valid_size, batch_size, world)
        report = evaluate(task, task.build(), batches, precision, Watchdog(world))
        return dict(report.metrics)

    for batch_size in (2, 4):
        results = [
            metrics
            for size in (1, 2, 3)
            for metrics in run_ranks(lambda world, of=batch_size: judged(world, of), size)
        ]
        assert all(metrics == results[0] for metrics in results)

    task, data = opened(root)
    torch.manual_seed(5)
    model = task.build().eval()
    [(images, labels)] = data.valid_batches([range(VALID)])
    with torch.no_grad():
        found = model(images)["out"].argmax(dim=1).numpy()
    truth = labels.numpy()
    counts = truth != 255
    ious = []
    for label in range(3):
        true, said = counts & (truth == label), counts & (found == label)
        ious.append((true & said).sum() / (true | said).sum())
        assert results[0][f"iou/{CLASSES[label]}"] == pytest.approx(ious[-1], rel=1e-12)
    assert results[0]["miou"] == pytest.approx(np.mean(ious), rel=1e-12)
    assert results[0]["pixel_accuracy"] == pytest.approx((found == truth)[counts].mean(), rel=1e-12)
    assert 0 < results[0]["miou"] < 1


# -- models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [NAMES[3], *[pytest.param(name, marks=pytest.mark.long) for name in NAMES[:3]]]
)
@pytest.mark.parametrize("aux_loss", [False, True])
def test_torchvisions_take_a_step(name: str, aux_loss: bool, root: Path) -> None:
    """With gradients for all of their parameters: DDP would wait for those of the others."""
    if name.startswith("lraspp") and aux_loss:
        with pytest.raises(UserError, match=r"model\.aux_loss=true: lraspp_.* has no auxiliary head"):
            torchvision_segmenter(SegmenterName(name), 3, aux_loss=True)
        return
    model = torchvision_segmenter(SegmenterName(name), 3, aux_loss, norm_momentum=0.2).train()
    assert {module.momentum for module in model.modules() if isinstance(module, _BatchNorm)} == {0.2}
    task, _ = opened(root)
    truth = torch.randint(0, 3, (2, 64, 64))
    task.loss(model, (torch.randn(2, 3, 64, 64), truth), AT).sum.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert ("aux" in model(torch.randn(2, 3, 64, 64))) == aux_loss


def test_names_are_listed_and_suggested() -> None:
    assert all(SegmenterName.problem(name) is None for name in NAMES)
    assert "Did you mean fcn_resnet50?" in (SegmenterName.problem("fcn_resnet5") or "")
    assert "which of these 6?" in (SegmenterName.problem("") or "")
    assert "there is no such model" in (SegmenterName.problem("resnet50") or "")
    assert "35.3 M parameters" in (SegmenterName.problem("*fcn*50") or "")


def test_one_picture_with_a_map_of_one_cell_is_one_sentence(root: Path) -> None:
    task, _ = opened(root)
    model = torchvision_segmenter(SegmenterName(NAMES[0]), 3).train()
    batch = (torch.randn(1, 3, 64, 64), torch.zeros(1, 64, 64, dtype=torch.int64))
    with pytest.raises(UserError, match=r"BatchNorm needs more than one value\. Use a larger") as refused:
        task.loss(model, batch, AT)
    assert not refused.value.everywhere


# -- the run, and what follows it -------------------------------------------------------------------

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
WORDS = (
    "recipe=segmentation data.root=set data.size=64 data.workers=0 device=cpu init.weights=null"
    " model.name=lraspp_mobilenet_v3_large train.batch_size=6 train.steps=40 train.eval_every=40"
    " optim.lr=0.005 run.dir=run"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``run`` of two DDP ranks, of a set that has been moved to ``moved``. The longer side of its pictures is
    the model's size."""
    folder = tmp_path_factory.mktemp("run")
    mask_set(folder / "set")
    done = ddptrain(folder, f"launch --nproc-per-node=2 {WORDS}", **ONE_THREAD)
    assert done.code == 0, done.err
    (folder / "set").rename(folder / "moved")
    return folder


@pytest.mark.long
def test_predict_writes_masks_as_they_are_evaluated(run: Path, tmp_path: Path) -> None:
    done = ddptrain(
        run, f"predict run=run checkpoint=last source=moved/val/images out={tmp_path}/seen", **ONE_THREAD
    )
    assert done.code == 0, done.err
    *lines, last = done.out.splitlines()
    assert last == f"{tmp_path}/seen: masks and overlays of 4 pictures"
    right, either = np.zeros(3), np.zeros(3)
    model = load(run / "run", checkpoint="last")
    for line, file in zip(lines, sorted((run / "moved/val/images").iterdir()), strict=True):
        assert line.startswith(f"moved/val/images/{file.name}: ")
        mask = Image.open(tmp_path / "seen/masks" / file.name)
        overlay = Image.open(tmp_path / "seen/overlays" / f"{file.stem}.jpg")
        assert mask.mode == "P"
        assert (mask.getpalette() or [])[:9] == PALETTE[:9]
        assert mask.size == overlay.size == Image.open(file).size
        assert np.array_equal(model.predict(file), mask)
        found, truth = np.asarray(mask), np.asarray(Image.open(run / "moved/val/masks" / file.name))
        shares = {name: f"{name} {(found == label).mean():.1%}" for label, name in enumerate(CLASSES)}
        assert set(line.split(": ", 1)[1].split(", ")) == {shares[CLASSES[i]] for i in np.unique(found)}
        for label in range(3):
            true, said = (truth != 255) & (truth == label), (truth != 255) & (found == label)
            right[label] += (true & said).sum()
            either[label] += (true | said).sum()
    metrics = json.loads((run / "run/summary.json").read_text())["metrics"]
    assert metrics["miou"] == pytest.approx((right / either)[either > 0].mean(), abs=2e-3)


@pytest.mark.long
def test_predict_takes_pictures_of_any_size_kind_and_orientation(run: Path, tmp_path: Path) -> None:
    (tmp_path / "in/deep").mkdir(parents=True)
    for size in ((1, 1), (300, 2), (7, 200)):
        Image.new("L", size, 77).save(tmp_path / f"in/{size[0]}x{size[1]}.webp")
    tag = Image.Exif()
    tag[0x0112] = 6
    Image.new("RGB", (50, 20)).save(tmp_path / "in/deep/turned.jpg", exif=tag)
    done = ddptrain(tmp_path, f"predict run={run}/run source=in", **ONE_THREAD)
    assert done.code == 0, done.err
    written = {
        str(path.relative_to(tmp_path / "predictions/masks")): Image.open(path).size
        for path in (tmp_path / "predictions/masks").rglob("*.png")
    }
    sizes = {"1x1.png": (1, 1), "300x2.png": (300, 2), "7x200.png": (7, 200), "deep/turned.png": (20, 50)}
    assert written == sizes


@pytest.mark.long
@pytest.mark.parametrize("kind", ["onnx", "pt2"])
def test_an_export_says_what_predict_says(kind: str, run: Path, tmp_path: Path) -> None:
    """By the program that docs/segmentation.md shows, which knows the JSON alone; for any number of
    pictures."""
    done = ddptrain(
        run, f"export run=run checkpoint=last format={kind} out={tmp_path}/model.{kind}", **ONE_THREAD
    )
    assert done.code == 0, done.err
    assert "input      images, float32 (any, 3, 64, 64)" in done.err
    about = json.loads((tmp_path / f"model.{kind}.json").read_text())
    assert about["classes"] == list(CLASSES)
    if kind == "pt2":
        model = torch.export.load(tmp_path / "model.pt2").module()
        assert [model(torch.zeros(n, 3, 64, 64)).shape for n in (1, 5)] == [(1, 3, 64, 64), (5, 3, 64, 64)]
        return
    properties = {one.key: one.value for one in onnx.load(tmp_path / "model.onnx").metadata_props}
    assert json.loads(properties["ddptrain"]) == about
    page = (Path(__file__).parents[2] / "docs/segmentation.md").read_text()
    (tmp_path / "use.py").write_text(page.split("```python\n")[1].split("```")[0])
    shutil.copytree(run / "moved/val/images", tmp_path / "in")
    for file in sorted((tmp_path / "in").iterdir()):  # and with 16 bits of grey
        deep = np.asarray(Image.open(file).convert("L"), np.uint16) * 257
        Image.fromarray(deep).save(tmp_path / "in" / f"deep-{file.stem}.png")
    predicted = ddptrain(
        run, f"predict run=run checkpoint=last source={tmp_path}/in out={tmp_path}/seen", **ONE_THREAD
    )
    assert predicted.code == 0, predicted.err
    files = sorted((tmp_path / "in").iterdir())
    subprocess.run([sys.executable, "use.py", *map(str, files)], cwd=tmp_path, check=True)
    same = [
        np.asarray(Image.open(tmp_path / f"{i}.png"))
        == np.asarray(Image.open(tmp_path / "seen/masks" / f"{file.stem}.png"))
        for i, file in enumerate(files)
    ]
    assert min(of.mean() for of in same) > 0.99, [of.mean() for of in same]
    assert np.mean([of.mean() for of in same]) > 0.999  # a pixel on the edge may fall either way
    assert len(np.unique(np.asarray(Image.open(tmp_path / "0.png")))) > 1


def test_a_figure_shows_pictures_masks_and_predictions(root: Path) -> None:
    task, _ = opened(root)
    figure = task.figures(task.build().eval())["predictions"]
    assert isinstance(figure, Picture)
    assert figure.pixels.shape == (3, 4 * (SIZE + 4) + 4, 3 * (SIZE + 4) + 4)
    assert figure.pixels.dtype == torch.uint8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("recipe=segmentation data.root=moved model.name=fcn", "model.name=fcn: there is no such model."),
        (
            "recipe=segmentation data.root=moved +model.dropout=0.3",
            "model.dropout: ddptrain.recipes.segmenters",
        ),
        ("recipe=segmentation data.root=moved model.norm_momentum=0", "model.norm_momentum=0: must be above"),
        ("recipe=segmentation data.root=moved data.classes=two", "data.classes=two: must be a list"),
        ("recipe=segmentation data.root=moved data.size=8", "data.size=8: must be 32 to 4096 pixels"),
        ("recipe=segmentation data.root=nowhere", "data.root=nowhere: there is no such folder."),
        ("recipe=segmentation data.root=moved augment=light", "augment: is for image classification"),
        (
            "recipe=segmentation data=shapes",
            "task: ddptrain.recipes.segmentation.Segmentation needs MaskData",
        ),
        ("recipe=segmentation data.root=moved data.classes=2 init.weights=null", "moved/train/masks/"),
        ("predict run=run source=nowhere", "source=nowhere: names no picture"),
        ("predict run=run source=moved top=3", "top: predict takes no such word."),
        ("export run=run format=onnx batch=0", "batch=0: must be 1 or more"),
        ("evaluate run=run data.root=moved data.classes=[a,b,c]", "run/checkpoints/"),
    ],
)
def test_a_mistake_is_one_message(
    words: str, message: str, run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run)
    more = ["device=cpu", "data.workers=0", "train.steps=1"] if words.startswith("recipe") else []
    assert main([*words.split(), *more]) == ExitCode.USER_ERROR
    said = capfd.readouterr().err.split("ddptrain: ")
    assert said[-1].startswith(message), said
    assert len(said) == 2
