"""Classes that are rare, and pictures of several classes: weights, draws and figures against plain loops."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from shell import ddptrain, refusal
from sklearn.metrics import average_precision_score, balanced_accuracy_score, recall_score
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms import v2

from ddptrain.api.order import Shuffled
from ddptrain.api.recipe import Progress
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.dataset import DatasetData
from ddptrain.data.images.augment import Augment
from ddptrain.data.images.csv_labels import CsvLabels
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.mixing import Mix
from ddptrain.data.images.source import ArraySplit, ImageSet, ImageSource
from ddptrain.data.images.transforms import Transforms
from ddptrain.errors import UserError
from ddptrain.python.load import load
from ddptrain.recipes.image import ImageClassification
from ddptrain.recipes.multilabel import MultiLabelClassification, average_precision

PROGRESS = Progress(0, 0, 0.0)
NAMES = ("blue", "green", "red")
COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


class Counted(ImageSource):
    """So many pictures of each class; of two, where there are labels for several."""

    name = "counted"

    def __init__(self, counts: Sequence[int], several: bool = False) -> None:
        self.counts = counts
        self.several = several

    def fetch(self, root: Path) -> None:
        pass

    def open(self, root: Path) -> ImageSet:
        labels = torch.arange(len(self.counts)).repeat_interleave(torch.tensor(self.counts))
        images = torch.randint(0, 256, (len(labels), 4, 4, 3), dtype=torch.uint8)
        if self.several:
            labels = functional.one_hot(labels, len(self.counts)).float()
            labels[:, 0] = 1
        split = ArraySplit(images, labels)
        return ImageSet(split, split, [f"c{i}" for i in range(len(self.counts))], [128.0] * 3, [60.0] * 3)


class First(nn.Module):
    """The pictures' first numbers are the logits."""

    def __init__(self, num_classes: int, **others: object) -> None:
        super().__init__()
        self.classes = num_classes

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)[:, : self.classes]


def opened(counts: Sequence[int], several: bool = False, **options: Any) -> ImageData:
    data = ImageData(Counted(counts, several), options.pop("augment", Augment()), workers=0, **options)
    data.prepare(World(), 0)
    return data


@pytest.mark.parametrize("balance", [0.0, 0.5, 1.0])
def test_balance_draws_rare_classes_more_often(balance: float) -> None:
    counts = torch.tensor([5, 20, 75])
    data = opened(counts.tolist(), balance=balance)
    sampler = Sampler(data.train_size, 10, 0, epoch_order=data.epoch_order)
    seen = torch.cat([labels for _, labels in data.train_batches(sampler, range(400))]).bincount() / 4000
    wanted = counts ** (1 - balance) / (counts ** (1 - balance)).sum()
    assert torch.allclose(seen, wanted, atol=0.02)
    assert isinstance(data.epoch_order, Shuffled) == (balance == 0)


class Noisy(nn.Module):
    """Of the user's own: adds noise to a picture."""

    def forward(self, picture: Tensor) -> Tensor:
        return picture // 2 + torch.randint(0, 128, picture.shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("augment", "resident"),
    [
        (Augment(brightness=0.4, contrast=0.4), True),
        (Augment(brightness=0.4, contrast=0.4), False),
        (Transforms({"jitter": v2.ColorJitter(brightness=0.9)}), "auto"),
        (Transforms({"jitter": v2.ColorJitter(brightness=0.9)}, mix=Mix(mixup=1.0, cutmix=0)), "auto"),
        (Noisy(), "auto"),
    ],
    ids=["Augment, resident", "Augment", "Transforms", "Mix", "a module"],
)
def test_what_balance_draws_again_is_augmented_anew(augment: Any, resident: Any) -> None:
    """In an epoch no two pictures are alike, though one sample makes a half of them; the same pictures for
    any ranks, and from any step on."""
    data = opened([1, 31], balance=1.0, augment=augment, resident=resident)

    def batches(steps: range, rank: int = 0, ranks: int = 1) -> list[Tensor]:
        sampler = Sampler(32, 16, 5, rank, ranks, epoch_order=data.epoch_order)
        return [pixels.clone() for pixels, _ in data.train_batches(sampler, steps)]

    whole = batches(range(4))
    for epoch in (torch.cat(whole[:2]), torch.cat(whole[2:])):
        assert len(epoch.flatten(1).unique(dim=0)) == 32
    assert torch.equal(torch.cat(batches(range(3, 4))), whole[3])
    halves = [batches(range(4), rank, 2) for rank in range(2)]
    assert all(torch.equal(torch.cat(of), pixels) for *of, pixels in zip(*halves, whole, strict=True))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("label", [-100, -1, 3])
def test_a_label_of_no_class_is_refused(label: int, smoothing: float) -> None:
    """Also that which torch's cross-entropy leaves out."""
    task = ImageClassification(First, opened([5, 20, 75]), smoothing, class_weights="balanced")
    batch = torch.randn(2, 3, 4, 4), torch.tensor([0, label])
    model = task.build()
    with pytest.raises(UserError, match="a label is beyond the 3 classes, which count from 0 to 2"):
        task.loss(model, batch, PROGRESS)
    with pytest.raises(UserError, match="a label is beyond the 3 classes, which count from 0 to 2"):
        task.evaluate(model, batch)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_are_cross_entropys_own(smoothing: float) -> None:
    data = opened([5, 20, 75])
    task = ImageClassification(First, data, smoothing, class_weights="balanced")
    model = task.build()
    images, labels = torch.randn(7, 3, 4, 4), torch.tensor([0, 1, 2, 2, 1, 2, 2])
    weights = torch.tensor([100 / (3 * n) for n in (5, 20, 75)])
    loss = task.loss(model, (images, labels), PROGRESS)
    wanted = functional.cross_entropy(
        model(images), labels, weights, reduction="sum", label_smoothing=smoothing
    )
    assert torch.allclose(loss.sum, wanted)
    assert loss.count == 7
    # over the training set the mean weight is 1
    assert torch.allclose(weights[data.all_labels[0]].mean(), torch.tensor(1.0))
    plain = ImageClassification(First, data)
    plain.build()
    told = [t.evaluate(model, (images, labels))["loss"] for t in (task, plain)]
    assert torch.equal(*told)  # evaluation is without


def test_figures_of_unequal_classes_are_sklearns() -> None:
    draw = torch.Generator().manual_seed(1)
    truth = torch.cat([torch.full((n,), i) for i, n in enumerate((5, 20, 75))])
    answers = torch.where(
        torch.rand(100, generator=draw) < 0.6, truth, torch.randint(3, (100,), generator=draw)
    )
    data = opened([5, 20, 75])
    task = ImageClassification(First, data, best_metric="balanced_accuracy")
    confusion = torch.zeros(3, 3, dtype=torch.int64)
    for t, a in zip(truth, answers, strict=True):
        confusion[t, a] += 1
    sums = {"loss": torch.tensor(1.0), "confusion": confusion, "in_top5": torch.tensor(100)}
    found = task.report(sums).metrics
    assert found["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(truth, answers))
    for name, recall in zip(("c0", "c1", "c2"), recall_score(truth, answers, average=None), strict=True):
        assert found[f"recall/{name}"] == pytest.approx(recall)
    assert task.best_metric == "balanced_accuracy"
    assert not ImageClassification(First, data, best_metric="loss").higher_is_better


@settings(deadline=None, max_examples=200)
@given(pairs=st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=40))
def test_average_precision_is_sklearns_with_equal_scores_too(pairs: list[tuple[int, bool]]) -> None:
    scores, positive = (torch.tensor(of) for of in zip(*pairs, strict=True))
    found = average_precision(scores.float(), positive)
    if not positive.any():
        assert found is None
        return
    assert found == pytest.approx(average_precision_score(positive.numpy(), scores.numpy()))


def test_several_labels_a_picture() -> None:
    data = opened([5, 20, 75], several=True)
    task = MultiLabelClassification(First, data, label_smoothing=0.2, class_weights="balanced")
    model = task.build()
    images, labels = torch.randn(6, 3, 4, 4), torch.tensor([[1.0, 0, 1]] * 3 + [[1.0, 1, 0]] * 3)
    loss = task.loss(model, (images, labels), PROGRESS)
    slow = 0.0
    for logits, own in zip(model(images), labels, strict=True):
        terms = []
        for logit, target, positives in zip(logits, own, (100, 20, 75), strict=True):
            p, t, factor = torch.sigmoid(logit), target * 0.8 + 0.1, (100 - positives or 100) / positives
            terms.append(-(factor * t * p.log() + (1 - t) * (1 - p).log()))
        slow += float(sum(terms)) / 3
    assert float(loss.sum) == pytest.approx(slow, rel=1e-5)
    sums = task.evaluate(model, (images, labels))
    rows = sums["answers"]
    report = task.report({"loss": sums["loss"], "answers": rows.values})  # type: ignore[union-attr,dict-item]
    assert set(report.metrics) == {"map", "f1", "loss", "ap/c0", "ap/c1", "ap/c2"}
    assert report.metrics["ap/c0"] == pytest.approx(1)


def test_labels_of_the_other_kind_are_refused() -> None:
    for several, task in ((True, ImageClassification), (False, MultiLabelClassification)):
        with pytest.raises(UserError, match=r"^data: the labels must be .* of the other kind"):
            task(First, opened([5, 5], several)).build()
    with pytest.raises(UserError, match=r"^data\.balance: is for images of one class each"):
        _ = opened([5, 5], several=True, balance=1.0).epoch_order


class Odd(Counted):
    """One label of one part is none. part: 0 for training."""

    def __init__(self, value: float, part: int) -> None:
        super().__init__([5, 5], several=True)
        self.value, self.part = value, part

    def open(self, root: Path) -> ImageSet:
        found, other = super().open(root), super().open(root)
        parts = [found.train, other.valid]
        parts[self.part].labels[3, 1] = self.value
        return replace(found, train=parts[0], valid=parts[1])


@pytest.mark.parametrize("value", [-1.0, 0.5, 255.0, float("nan")])
def test_labels_that_are_neither_0_nor_1_are_refused(value: float) -> None:
    """-1 for a class that a picture lacks, as some sets have it, would train and be measured all the same."""
    said = f"^data: a label of several classes a sample is {value:g}; must be 1 where"
    for part in (0, 1):
        data = ImageData(Odd(value, part), Augment(), workers=0)
        data.prepare(World(), 0)
        with pytest.raises(UserError, match=said):
            MultiLabelClassification(First, data).build()
    samples = [(torch.zeros(3, 4, 4), torch.tensor([1.0, value if i == 9 else 0.0])) for i in range(20)]
    for valid in (samples[9:], samples):  # the first of validation is seen at once
        whole = DatasetData(samples, valid, classes=2, workers=0)  # type: ignore[arg-type]
        whole.prepare(World(), 0)
        task = MultiLabelClassification(First, whole)
        if valid is not samples:
            with pytest.raises(UserError, match=said):
                task.build()
            continue
        sums = task.evaluate(task.build(), next(iter(whole.valid_batches([range(20)]))))
        with pytest.raises(UserError, match=said):
            task.report({"loss": sums["loss"], "answers": sums["answers"].values})  # type: ignore[union-attr,dict-item]


def test_mixed_samples_have_mixed_labels() -> None:
    data = opened([10, 10, 10], several=True, augment=Transforms(mix=Mix(1.0, 0)))
    ((_, targets),) = data.train_batches(Sampler(30, 30, 0), range(1))
    assert targets.shape == (30, 3)
    assert torch.allclose(targets[:, 0], torch.ones(30))  # which all pictures have
    assert ((targets > 0) & (targets < 1)).any()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty pictures with stripes of some of three colours."""
    root = tmp_path_factory.mktemp("csv")
    several, single, columns = [["file", "labels", "split"]], [["file", "label"]], [["file", *NAMES]]
    for i in range(60):
        own = [name for bit, name in enumerate(NAMES) if (i % 7 + 1) >> bit & 1]
        picture = Image.new("RGB", (24, 24))
        for row, name in enumerate(own):
            picture.paste(COLOURS[name], (0, row * 8, 24, row * 8 + 8))
        picture.save(root / f"{i}.png")
        several.append([f"{i}.png", ";".join(own), "val" if i % 3 == 0 else "train"])
        single.append([f"{i}.png", own[0]])
        columns.append([f"{i}.png", *(str(int(name in own)) for name in NAMES)])
    for name, rows in (("labels", several), ("single", single), ("columns", columns)):
        with (root / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    return root


@pytest.mark.parametrize("file", ["labels.csv", "columns.csv"])
def test_a_csv_file_lists_pictures_of_several_classes(pictures: Path, file: str) -> None:
    found = CsvLabels(file, size=24).open(pictures)
    assert list(found.classes) == list(NAMES)
    assert (len(found.train), len(found.valid)) == ((40, 20) if file == "labels.csv" else (54, 6))
    first = [1, 2] if file == "labels.csv" else [0, 1]  # line i: the bits of i % 7 + 1
    for place, i in enumerate(first):
        assert found.train.labels[place].tolist() == [float((i % 7 + 1) >> bit & 1) for bit in range(3)]


@pytest.mark.long
def test_it_learns_and_answers(pictures: Path, tmp_path: Path) -> None:
    words = (
        f"recipe=finetune data=csv data.root={pictures} data.source.size=24 augment=none model.name=resnet18"
        " init.weights=null optim.layer_decay=null optim.lr=0.001 train.batch_size=16 train.epochs=8"
        " task._target_=ddptrain.recipes.multilabel.MultiLabelClassification device=cpu run.dir=run"
    )
    done = ddptrain(tmp_path, words, OMP_NUM_THREADS="1")
    assert done.code == 0, done.err
    told = ddptrain(tmp_path, f"predict run=run source={pictures}/6.png", OMP_NUM_THREADS="1")
    assert told.code == 0, told.err
    with (tmp_path / "predictions/predictions.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["file", *NAMES]
    assert all(float(value) > 0.5 for value in rows[1][1:])  # 7: all three
    said = load(tmp_path / "run").predict(pictures / "6.png")
    assert sorted(said.values(), reverse=True) == [*said.values()]
    assert [said[name] for name in NAMES] == pytest.approx([*map(float, rows[1][1:])], abs=1e-5)
    single = words.replace(" task._target_=ddptrain.recipes.multilabel.MultiLabelClassification", "")
    assert refusal(tmp_path, f"{single} run.dir=other").startswith("data: the labels must be int64 (n,)")
    one = f"{single} data.source.file=single.csv train.epochs=1 task.class_weights=balanced run.dir=single"
    assert ddptrain(tmp_path, one, OMP_NUM_THREADS="1").code == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "labels.csv: its first line must name the columns: file, and label"),
        ("name,label\na.png,x\n", "labels.csv: its first line must name the columns"),
        ("file,label\na.png\n", "labels.csv, line 2: has not as many values as there are columns (2)."),
        ("file,label\na.png,x,y\n", "labels.csv, line 2: has not as many values"),
        ("file,label\nb.png,x\n", "labels.csv, line 2: file=b.png: there is no such file in"),
        ("file,label\na.png,\n", "labels.csv, line 2: has no label."),
        ("file,label\na.png,x\n", "labels.csv: names 1 class(es)"),
        ("file,x,y\na.png,1,2\n", "labels.csv, line 2: y=2: must be 1 (the picture has this class) or 0."),
        ("file,label,split\na.png,x,dev\n", "labels.csv, line 2: split=dev: must be one of train"),
        ("file,label\na.png,x\nc.png,y\n", "labels.csv: no line is left for validation."),
        ('file,label\na.png,"x\n', "labels.csv: can't be read as CSV in UTF-8 (unexpected end of data)"),
    ],
)
def test_mistakes_in_the_file_are_named_by_their_line(tmp_path: Path, text: str, said: str) -> None:
    for name in ("a.png", "c.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    (tmp_path / "labels.csv").write_text(text)
    with pytest.raises(UserError) as refused:
        CsvLabels(size=4).open(tmp_path)
    assert str(refused.value).removeprefix(f"{tmp_path}/").startswith(said)


def test_weights_that_fit_no_class_are_refused() -> None:
    for weights, said in (
        ([1.0], "task.class_weights: has 1 numbers; the data have 2"),
        ([1.0, 0.0], "task.class"),
    ):
        with pytest.raises(UserError, match=said):
            ImageClassification(First, opened([3, 3]), class_weights=weights).build()
