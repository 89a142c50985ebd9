"""The speed recipe by its parts, and that it learns."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, final

import pytest
import torch
from compare import assert_same
from shell import ddptrain
from torch import Tensor, nn
from torch.nn import functional
from toy import Fit, auto, lr_schedule, newest_state, run_killed_at, strict, weights

from ddptrain.api.world import World
from ddptrain.data.dataset import DatasetData
from ddptrain.data.images.augment import Augment
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.digits import Digits
from ddptrain.data.images.shapes import Shapes
from ddptrain.data.images.source import ArraySplit, ImageSet, ImageSource
from ddptrain.engine.plan import Plan
from ddptrain.errors import UserError
from ddptrain.recipes.image import ImageClassification
from ddptrain.recipes.pictures import classifier
from ddptrain.recipes.speedrun import SpeedrunNet, whitening_filters
from ddptrain.recipes.views import Views
from ddptrain.run.optimizer import build_optimizer

MUON: dict[str, Any] = {
    "_target_": "ddptrain.recipes.muon.MuonWithSgd",
    "lr": 0.205, "momentum": 0.655, "iterations": 3, "normalise_every": 4, "head_lr": 104.0, "bias_lr": 11.0,
    "sgd_momentum": 0.825, "weight_decay": 1.6e-3,
}  # fmt: skip
"""The recipe's, for an eighth of its width."""
GENTLE = {**MUON, "lr": 0.02, "head_lr": 1.0, "bias_lr": 0.1, "normalise_every": 3}


@final
class LargerDigits(ImageSource):
    """Grey 16x16 digits: scikit-learn's, twice as large."""

    name = "larger digits"

    def fetch(self, root: Path) -> None: ...

    def open(self, root: Path) -> ImageSet:
        small = Digits().open(root)
        parts = [
            ArraySplit(
                part.images(torch.arange(len(part))).repeat_interleave(2, 1).repeat_interleave(2, 2),
                part.labels,
            )
            for part in (small.train, small.valid)
        ]
        return ImageSet(parts[0], parts[1], small.classes, small.mean, small.std)


@cache
def drawn() -> ImageSet:
    return Shapes(train=1000, valid=23).open(Path())


@final
class FewShapes(ImageSource):
    """Drawn once for all tests and all ranks."""

    name = "few shapes"

    def __init__(self, train: int = 60) -> None:
        self._train = train

    def fetch(self, root: Path) -> None: ...

    def open(self, root: Path) -> ImageSet:
        train, ids = drawn().train, torch.arange(self._train)
        return replace(drawn(), train=ArraySplit(train.images(ids), train.labels[ids]))


def recipe(
    source: ImageSource, make: Callable[..., nn.Module] = SpeedrunNet, width: int = 4, tta: int = 0
) -> tuple[ImageClassification, ImageData]:
    data = ImageData(source, Augment(2, "alternate", brightness=0.035, contrast=0.13), resident=True)
    return ImageClassification(partial(make, width=width), data, label_smoothing=0.09, tta=tta), data


def built(width: int = 4, side: int = 32, channels: int = 3, examples: Tensor | None = None) -> SpeedrunNet:
    torch.manual_seed(0)
    return SpeedrunNet(10, channels, (side, side), lambda count: examples, width)


def pictures(count: int = 20) -> Tensor:
    """Normalised ones, with the correlations of real ones."""
    data = ImageData(FewShapes(count), Augment())
    data.prepare(World(), seed=0)
    found = data.examples(5000)
    assert found is not None
    assert found.shape == (count, 3, 32, 32)
    return found


def grey() -> Tensor:
    return pictures()[:, :1]


@pytest.mark.parametrize("make", [pictures, grey])
def test_the_first_layer_whitens_the_patches_it_was_made_of(make: Callable[[], Tensor]) -> None:
    images = make()
    filters = whitening_filters(images)
    half = len(filters) // 2
    assert filters.shape == (8 * images.shape[1], images.shape[1], 2, 2)
    assert torch.equal(filters[:half], -filters[half:])
    answers = functional.conv2d(images.double(), filters[:half].double()).transpose(0, 1).flatten(1)
    patches = functional.unfold(images.double(), 2).transpose(0, 1).flatten(1)
    spectrum = torch.linalg.eigvalsh(patches @ patches.T / patches.shape[1])
    moments = answers @ answers.T / answers.shape[1]
    torch.testing.assert_close(moments, torch.diag(spectrum / (spectrum + 5e-4)), rtol=0, atol=2e-3)
    assert float(spectrum[0]) > 5e-3  # so that the eps hardly shows
    assert float((moments - torch.eye(half)).abs().max()) < 0.1


def test_whitening_follows_from_the_pictures_alone() -> None:
    images = pictures(40)
    turned = torch.cat([images[20:], images[:20]])
    torch.testing.assert_close(whitening_filters(images), whitening_filters(turned), rtol=1e-3, atol=1e-3)
    flat = torch.zeros(3, 3, 12, 12)  # no variance at all, in any direction
    assert bool(whitening_filters(flat).isfinite().all())


def test_what_is_frozen_is_not_trained() -> None:
    model = built(examples=pictures())
    assert torch.equal(model.whiten.weight, whitening_filters(pictures()))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    norms = {f"groups.{group}.norm{i}.weight" for group in range(3) for i in (1, 2)}
    assert frozen == {"whiten.weight", *norms}
    optimizer = build_optimizer(MUON, model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(pictures()).square().sum().backward()
    optimizer.step()
    after = model.state_dict()
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == frozen
    assert all(model.get_parameter(name).grad is None for name in frozen)


def test_convolutions_hand_on_their_channels_at_first() -> None:
    model = built(width=16)
    first, second = model.groups[0].conv1, model.groups[1].conv2
    x = torch.randn(2, 64, 7, 7)
    assert isinstance(second, nn.Conv2d)
    torch.testing.assert_close(second(x), x)
    x = torch.randn(2, 24, 7, 7)  # 24 whitened channels, of which 16 are handed on
    assert isinstance(first, nn.Conv2d)
    torch.testing.assert_close(first(x), x[:, :16])
    x = torch.randn(2, 16, 7, 7)
    third = model.groups[1].conv1
    assert isinstance(third, nn.Conv2d)
    torch.testing.assert_close(third(x)[:, :16], x)


def test_small_pictures_are_refused() -> None:
    built(side=9)(torch.randn(2, 3, 9, 9))
    with pytest.raises(UserError, match=r"^data: pictures of 8x8 are too small"):
        built(side=8)
    with pytest.raises(UserError, match=r"^model\.width=0: "):
        built(width=0)
    with pytest.raises(UserError, match=r"^task\.tta=3: "):
        recipe(FewShapes(), tta=3)


def test_views_are_those_of_a_slow_loop() -> None:
    model, images = built().eval(), pictures(4)
    mirrored = images.flip(-1)
    padded = functional.pad(images, (1, 1, 1, 1), mode="reflect")
    corners = [padded[..., 0:32, 0:32], padded[..., 2:34, 2:34]]
    with torch.no_grad():
        two = [model(images) / 2, model(mirrored) / 2]
        six = [part / 2 for part in two]
        six += [model(face) / 8 for corner in corners for face in (corner, corner.flip(-1))]
        for level, expected in ((0, model(images)), (1, sum(two)), (2, sum(six))):
            torch.testing.assert_close(Views(model, level)(images), expected)


class Overwriting(nn.Module):
    """Gives its answers in one place, each over the last, as a CUDA graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = torch.zeros(2, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.answer.copy_(images[:, :, 0, 0])


@pytest.mark.parametrize("level", [1, 2])
def test_views_do_not_count_on_an_answer_that_stays(level: int) -> None:
    images = torch.randn(2, 3, 8, 8)
    kept = Views(Overwriting(), level)(images)
    copied = nn.Sequential(Overwriting(), Copy())
    torch.testing.assert_close(kept, Views(copied, level)(images))


class Copy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def calendar(**changes: Any) -> Plan:
    usual = {"steps": 6, "train_size": 60, "batch_size": 16, "log_every": 2, "save_every": 2, "seed": 3}
    return Plan(**{**usual, **changes})


def trained(
    folder: Path,
    sizes: list[tuple[int, int | None]],
    make: Callable[..., nn.Module] = SpeedrunNet,
    **how: Any,
) -> dict[str, Any]:
    """The last checkpoint after stretches of (ranks, killed after which save)."""
    strategy = strict(4) if how.get("shards") else auto()
    drawn()  # before the ranks are forked
    for size, stop_at in sizes:

        def rank(world: World, stop_at: int | None = stop_at) -> None:
            torch.use_deterministic_algorithms(bool(how.get("shards")))
            task, data = recipe(FewShapes(), make, width=2, tta=2)
            fit = Fit(
                calendar(**how), optim=GENTLE, sched=lr_schedule("linear"), ema=0.9,
                strategy=strategy,
            )  # fmt: skip
            fit.train(task, data, world, folder, stop_at if world.is_first else None)

        run_killed_at(stop_at, rank, size, folder)
    return newest_state(folder)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path: Path, ranks: int) -> None:
    whole = trained(tmp_path / "whole", [(ranks, None)])
    assert_same(whole, trained(tmp_path / "stopped", [(ranks, 4), (ranks, None)]))
    assert whole["step"] == 6


@pytest.mark.long
def test_strict_ranks_give_the_same_bits(tmp_path: Path) -> None:
    alone = trained(tmp_path / "alone", [(1, None)], shards=4)
    assert_same(alone, trained(tmp_path / "ranks", [(2, 4), (3, None)], shards=4))


class NormFree(nn.Module):
    """Without what depends on the split of a batch, in float64."""

    def __init__(self, width: int, **offered: Any) -> None:
        super().__init__()
        self.net = SpeedrunNet(**offered, width=width).double()
        for group in self.net.groups:
            group.norm1, group.norm2 = nn.Identity(), nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images.double())
        return logits


def test_ranks_train_the_same_but_for_rounding(tmp_path: Path) -> None:
    def make(num_classes: int, in_channels: int, image_size: tuple[int, int], **more: Any) -> nn.Module:
        return NormFree(num_classes=num_classes, in_channels=in_channels, image_size=image_size, **more)

    alone, two = (trained(tmp_path / str(ranks), [(ranks, None)], make) for ranks in (1, 2))
    start = make(10, 3, (32, 32), examples=lambda count: None, width=2).state_dict()
    for name, value in alone["model"].items():
        torch.testing.assert_close(value, two["model"][name], rtol=1e-9, atol=1e-9)
        assert name == "net.whiten.weight" or not torch.equal(value, start[name])


def test_a_checkpoint_needs_no_data_set(tmp_path: Path) -> None:
    task, data = recipe(FewShapes())
    data.prepare(World(), seed=0)
    model = task.build().eval()
    other_task, recalled = recipe(FewShapes())
    recalled.load_metadata(data.metadata(), World())
    assert recalled.examples(10) is None
    other = other_task.build().eval()
    images = pictures(2)
    assert not torch.equal(model(images), other(images))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(images), other(images))


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "least", "steps"),
    [(Shapes(train=2000, valid=500), 0.8, 30), (LargerDigits(), 0.9, 60)],
)
def test_it_learns_in_a_few_steps(tmp_path: Path, source: ImageSource, least: float, steps: int) -> None:
    task, data = recipe(source, width=8, tta=1)
    size = 2000 if isinstance(source, Shapes) else 1438
    plan = Plan(steps=steps, train_size=size, batch_size=250, eval_every=1000, seed=0)
    state, report = Fit(plan, optim=MUON, sched=lr_schedule("linear")).train(task, data, World(), tmp_path)
    assert bool(weights(state).isfinite().all())
    assert report.metrics["accuracy"] > least


def test_the_recipe_as_it_is_called(tmp_path: Path) -> None:
    """Through the command: composed, trained, evaluated with all its views."""
    words = (
        "recipe=speedrun_cifar10 data=shapes data.source.train=200 data.source.valid=50 model.width=2"
        " train.batch_size=50 train.steps=5 device=cpu run.dir=run observers=[console,jsonl,plots]"
    )
    ended = ddptrain(tmp_path, words, OMP_NUM_THREADS="1")
    assert ended.code == 0, ended.err
    assert "SpeedrunNet" in ended.out + ended.err
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["split"] for line in lines] == ["train", "valid"]
    composed = (tmp_path / "run/config.yaml").read_text()
    assert all(said in composed for said in ("horizontal_flip: alternate", "lr_schedules.linear", "tta: 2"))


@pytest.mark.long
def test_a_compiled_network_learns_in_bf16() -> None:
    """torch's compiled gradient of amax is no number there (pytorch#186799)."""
    torch.manual_seed(0)
    model = SpeedrunNet(10, 3, (32, 32), lambda count: torch.randn(count, 3, 32, 32), width=8)
    compiled, labels = torch.compile(model), torch.arange(32) % 10

    def gradient(forward: Callable[[Tensor], Tensor], images: Tensor, precision: torch.dtype) -> Tensor:
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            loss = functional.cross_entropy(forward(images), labels)
        parts = torch.autograd.grad(loss, [weight for weight in model.parameters() if weight.requires_grad])
        return torch.cat([part.flatten() for part in parts])

    errors = torch.zeros(2)
    for _ in range(8):  # of a single batch rounding alone may be twice as far
        images = torch.randn(32, 3, 32, 32)
        exact = gradient(model, images, torch.float32)
        for i, forward in enumerate((model, compiled)):
            errors[i] += (gradient(forward, images, torch.bfloat16) - exact).square().sum()
    eager, own = errors.sqrt().tolist()
    assert own < 1.5 * eager, "no further from float32 than eager bf16"


def test_data_without_training_pictures_is_refused() -> None:
    """The first layer would stay random, for it is not trained."""
    data = DatasetData([(torch.rand(3, 16, 16), i % 2) for i in range(20)], classes=2, workers=0)  # type: ignore[arg-type]
    data.prepare(World(), seed=0)
    with pytest.raises(UserError, match="its first layer is made from training pictures"):
        classifier(SpeedrunNet, data, multi_label=False)
