"""Any map-style dataset: what is random in it follows from the sample, whatever reads it."""

import random
import threading
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shell import ddptrain, refusal
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from ddptrain.api.recipe import Data
from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.dataset import DatasetData
from ddptrain.data.pipeline import Samples
from ddptrain.data.prefetch import rows_of, tensors_of
from ddptrain.data.workers import Key
from ddptrain.errors import ExitCode, UserError

SEED, BATCH, STEPS = 4, 8, range(3, 8)
"""40 of 45 training samples and more: over an epoch's end."""


class Noisy(Dataset[Any]):
    """Draws from all three global generators."""

    classes = ("one", "two", "three")

    def __init__(self, size: int = 50) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = [torch.rand(()), torch.tensor(random.random()), torch.tensor(np.random.rand())]
        return torch.stack([*drawn, torch.tensor(float(index))]).reshape(1, 2, 2).float(), index % 3


class Seldom(Noisy):
    """Draws from Python's and NumPy's for one sample in ten: not in each batch."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = [random.random(), np.random.standard_normal()] if index % 10 == 7 else [0, 0]
        return torch.tensor([torch.rand(()), *drawn, index]).reshape(1, 2, 2), index % 3


class Named(Dataset[Any]):
    """Dicts, as Hugging Face's datasets give them."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixels": torch.full((3, 4, 4), float(index)), "label": index % 2, "name": f"n{index}"}


class ClassLabel:
    """As Hugging Face's."""

    def __init__(self, names: list[str]) -> None:
        self.names = names


class Growing(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(1, index + 1, 2), 0


class Gone(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 7:
            raise FileNotFoundError(2, "No such file or directory", "7.jpg")
        return super().__getitem__(index)


class Buggy(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raise ZeroDivisionError("by nought")


class Preloaded(Noisy):
    """Each sample is a tensor of its own: a process can't be sent so many file descriptors."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.pixels = [torch.full((1, 2, 2), float(i)) for i in range(size)]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.pixels[index], index % 3


class Locked(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


class Counted(Stream):
    def __len__(self) -> int:
        return 10


SETS = """
import torch
class Halves:
    classes = ["a", "b"]
    def __len__(self): return 20
    def __getitem__(self, index): return torch.zeros(3, 8, 8), 0.5
class Bytes(Halves):
    def __getitem__(self, index): return torch.zeros(3, 8, 8, dtype=torch.uint8), 0
class Dicts(Halves):
    def __getitem__(self, index): return {"image": torch.zeros(3, 8, 8), "label": 0}
class Unnamed:
    def __len__(self): return 20
    def __getitem__(self, index): return torch.zeros(3, 8, 8), 0
"""


def prepared(dataset: Any, workers: int = 0, **options: Any) -> DatasetData:
    data = DatasetData(dataset, workers=workers, **options)
    data.prepare(World(), SEED)
    return data


def batches(data: Data, world_size: int = 1, rank: int = 0, steps: range = STEPS) -> list[Any]:
    return list(data.train_batches(Sampler(data.train_size, BATCH, SEED, rank, world_size), steps))


@pytest.mark.parametrize("kind", [Noisy, Seldom])
def test_ranks_workers_and_restarts_change_no_bit(kind: type[Noisy]) -> None:
    alone = batches(prepared(kind()))
    parts = [batches(prepared(kind()), 3, rank) for rank in range(3)]
    for whole, *ranks in zip(alone, *parts, strict=True):
        assert all(torch.equal(a, torch.cat(b)) for a, b in zip(whole, zip(*ranks, strict=True), strict=True))
    for others in (batches(prepared(kind(), workers=2)), batches(prepared(kind()), steps=range(5, 8))):
        for one, other in zip(alone[-len(others) :], others, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_each_epoch_draws_anew_and_validation_never() -> None:
    data = prepared(Noisy())
    images = torch.cat([images for images, _ in batches(data, steps=range(12))])  # 96 draws of 45 samples
    index = images[:, 0, 1, 1]
    first, second = images[index == index[0]][:2]
    assert not torch.equal(first, second)
    (one,), (again,) = (list(data.valid_batches([range(5)])) for _ in range(2))
    assert torch.equal(one[0], again[0])
    assert one[0][:, 0, 1, 1].tolist() == [9, 19, 29, 39, 49]  # every tenth is held out


@pytest.mark.parametrize(("kind", "samples"), [(Noisy, (3, 4)), (Seldom, (3, 4)), (Seldom, (3, 7))])
def test_the_generators_of_the_trainer_go_on_as_if_nothing_was_read(
    kind: type[Noisy], samples: tuple[int, ...]
) -> None:
    def drawn() -> tuple[float, ...]:
        return float(torch.rand(())), random.random(), float(np.random.standard_normal()), np.random.rand()

    draws = []
    for reads in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        np.random.standard_normal()  # draws two, and keeps one
        if reads:
            Samples(kind(), collate=len, seed=SEED).batch(Key(0, i) for i in samples)
        draws.append(drawn())
    assert draws[0] == draws[1]


def test_a_model_of_other_classes_is_not_loaded() -> None:
    data = DatasetData(Noisy())
    data.load_metadata({"classes": ["one", "two", "three"]}, World())
    assert data.outputs == ("one", "two", "three")
    for theirs in (["two", "one", "three"], ["one", "two"], ["one", "two", "three", "four"]):
        with pytest.raises(UserError, match=r"^data\.dataset: its classes are one, two, three, and "):
            data.load_metadata({"classes": theirs}, World())
    unnamed = DatasetData(Subset(Noisy(), range(20)))
    assert unnamed.outputs == ()
    unnamed.load_metadata({"classes": ["two", "one"]}, World())
    assert unnamed.outputs == ("two", "one")


def test_dicts_collating_and_a_validation_set_of_its_own() -> None:
    data = prepared(Named(), valid=Noisy(7))
    assert (data.train_size, data.valid_size, data.outputs) == (20, 7, ())
    (batch,) = batches(data, steps=range(1))
    assert set(batch) == {"pixels", "label", "name"}
    assert batch["name"] == [f"n{int(value)}" for value in batch["pixels"][:, 0, 0, 0]]
    own = prepared(Named(), collate=len, classes=["a", "b"])
    assert batches(own, steps=range(2)) == [BATCH, BATCH]
    assert own.outputs == ("a", "b")
    assert prepared(Named(), classes=4).outputs == ("0", "1", "2", "3")
    assert prepared(Noisy()).outputs == ("one", "two", "three")
    odd = prepared(Named(), valid=Named(), collate=len, valid_collate=lambda samples: samples[0]["name"])
    assert batches(odd, steps=range(1)) == [BATCH]
    assert list(odd.valid_batches([range(2, 5)])) == ["n2"]


@pytest.mark.parametrize(
    ("attributes", "outputs"),
    [
        ({"features": torch.zeros(20, 3)}, ()),
        ({"features": np.zeros((20, 3))}, ()),
        ({"features": ["a", "label"]}, ()),
        ({"features": {"label": ClassLabel(["a", "b"])}}, ("a", "b")),
        ({"classes": np.array(["a", "b"])}, ("a", "b")),
        ({"classes": 10}, ()),
        ({"classes": torch.zeros(20)}, ()),
    ],
)
def test_attributes_of_these_names_may_be_anything(
    attributes: dict[str, Any], outputs: tuple[str, ...]
) -> None:
    dataset = Named()
    vars(dataset).update(attributes)
    assert prepared(dataset).outputs == outputs


@pytest.mark.parametrize("size", [100, 300, 3000])
def test_workers_are_sent_any_number_of_tensors(size: int) -> None:
    own = Preloaded(size)
    sent, read_here = batches(prepared(own, workers=2)), batches(prepared(own))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(sent, read_here, strict=True))
    assert any(pixels.is_shared() for pixels in own.pixels) == (size == 100)


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), lambda: random.random(), lambda: np.random.rand()])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_that_draws_is_refused(draw: Callable[[], Any], workers: int) -> None:
    """What it draws would follow from the batch, and so from the number of ranks."""

    def noisy(samples: list[Any]) -> Tensor:
        return torch.tensor(len(samples) + float(draw()))

    with pytest.raises(UserError, match=r"^data\.collate .*: draws random numbers"):
        batches(prepared(Noisy(), workers=workers, collate=noisy))


def test_a_batch_may_be_any_mapping(tmp_path: Path) -> None:
    """As transformers' BatchEncoding is one."""

    def collate(samples: list[Any]) -> UserDict[str, Any]:
        return UserDict(x=torch.stack([pixels for pixels, _ in samples]), size=len(samples))

    (batch,) = batches(prepared(Noisy(), collate=collate), steps=range(1))
    assert [tensor.shape for tensor in tensors_of(batch)] == [(BATCH, 1, 2, 2)]
    rows = rows_of(batch, slice(3))
    assert type(rows) is UserDict
    assert (len(rows["x"]), rows["size"], len(batch["x"])) == (3, BATCH, BATCH)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda: DatasetData(Stream()), "data.dataset: Stream is not map-style; it needs __len__"),  # type: ignore[arg-type]
        (lambda: DatasetData(Named(), valid=Stream()), "data.valid: Stream is not map-style"),  # type: ignore[arg-type]
        (
            lambda: DatasetData(Counted()),
            "data.dataset: Counted is not map-style",
        ),  # torch's has a __getitem__
        (lambda: DatasetData(Named(), classes=1), "data.classes=1: must be 2 or more."),
        (
            lambda: prepared(Locked(), workers=1),
            "data.workers: the data can't be sent to loader processes (cannot pickle",
        ),
        (lambda: batches(prepared(Growing())), "data.dataset: its samples don't make a batch (stack expects"),
        (lambda: batches(prepared(Gone())), "data.dataset: sample 7 can't be read ([Errno 2] No such file"),
        (lambda: batches(prepared(Gone(), workers=1)), "data.dataset: sample 7 can't be read ([Errno 2]"),
    ],
)
def test_what_is_wrong_is_named(use: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError) as refused:
        use()
    assert str(refused.value).startswith(said)


def test_a_bug_of_the_dataset_is_shown_with_its_sample() -> None:
    with pytest.raises(ZeroDivisionError) as bug:
        batches(prepared(Buggy()))
    assert bug.value.__notes__[0].startswith("(in sample ")
    with pytest.raises(ZeroDivisionError) as bug:
        list(prepared(Noisy(), valid_collate=lambda samples: 1 // 0).valid_batches([range(2)]))
    assert bug.value.__notes__ == ["(in data.valid_collate)"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "Bytes",
            "data: batches must be (images, labels): float images (n, C, H, W), normalised, and labels.",
        ),
        (
            "Halves",
            "data: the labels must be int64 (n,), one class a picture, for this task, and are float64",
        ),
        (
            "Dicts",
            "data: batches must be (images, labels): float images (n, C, H, W), normalised, and labels.",
        ),
        ("Unnamed", "data: a classifier needs the names of two classes or more, and DatasetData has 0"),
    ],
)
def test_image_classification_says_what_it_takes(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "own_sets.py").write_text(SETS)
    words = f"recipe=cnn_cifar10 data=dataset data.dataset._target_=own_sets.{name} device=cpu data.workers=0"
    assert refusal(tmp_path, f"{words} train.steps=1 run.dir=run").startswith(said)


@pytest.mark.long
def test_torchvisions_own_by_its_name(tmp_path: Path) -> None:
    """With transforms in a list, and two ranks; exported without the data's picture rules."""
    v2 = "torchvision.transforms.v2"
    steps = f"[{{_target_: {v2}.ToImage}}, {{_target_: {v2}.ConvertImageDtype}}]"
    words = (
        "launch --nproc-per-node=2 recipe=finetune data=dataset"
        " data.dataset._target_=torchvision.datasets.FakeData +data.dataset.size=40"
        " +data.dataset.image_size=[3,32,32] data.classes=10 model.name=resnet18 init.weights=null"
        " train.batch_size=8 train.steps=2 device=cpu run.dir=run"
    )
    transform = f"+data.dataset.transform={{_target_: {v2}.Compose, transforms: {steps}}}"
    done = ddptrain(tmp_path, [*words.split(), transform], OMP_NUM_THREADS="1")
    assert done.code == 0, done.err
    assert "FakeData: 36 train, 4 valid, 10 classes" in done.err
    assert ddptrain(tmp_path, "export run=run format=onnx").code == 0
    predicted = ddptrain(tmp_path, "predict run=run source=.")
    assert predicted.code == ExitCode.USER_ERROR
    assert "predict: reads picture files, and how DatasetData makes" in predicted.err


class Remembering(Noisy):
    """Keeps what it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = [None] * len(self)
        self.labels: list[int | None] = []

    def __getitem__(self, index: int) -> Any:
        if self.kept[index] is None:
            self.kept[index] = super().__getitem__(index)
        return self.kept[index]


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize("looked_at", [0, 5])
def test_what_a_dataset_has_read_is_no_other_data(on_error: str, looked_at: int) -> None:
    """Or a run that goes on is refused, for it was trained on other files. Labels are data, with gaps too."""
    dataset = Remembering()
    for i in range(looked_at):
        dataset[i]
    expected = prepared(Remembering()).identity
    assert prepared(dataset, on_error=on_error).identity == expected
    labelled = Remembering()
    labelled.labels = [1, None] * 25
    other = Remembering()
    other.labels = [2, None] * 25
    assert len({prepared(each).identity for each in (labelled, other)} | {expected}) == 3
