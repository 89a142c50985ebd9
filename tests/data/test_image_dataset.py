"""Pictures out of any map-style dataset are those of files with the same pixels."""

import sys
import threading
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from shell import ddptrain, refusal, under_torchrun
from torch import Tensor
from torch.utils.data import Subset
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor

from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.config.instantiate import build, check_node
from ddptrain.config.targets import open_package
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.dataset import DatasetImages
from ddptrain.data.images.folder import ImageFolder
from ddptrain.data.images.mixing import Mix
from ddptrain.data.images.source import ImageSource
from ddptrain.data.images.transforms import RandomResizedCrop, Transforms
from ddptrain.data.left_out import opened_set
from ddptrain.data.stream.images import StreamImages
from ddptrain.errors import UserError

KINDS: dict[str, Callable[[Image.Image, int], Any]] = {
    "Pillow": lambda picture, label: (picture, label),
    "tensor": lambda picture, label: (pil_to_tensor(picture), label),
    "array": lambda picture, label: [np.asarray(picture), label],
    "dict": lambda picture, label: {"image": picture, "label": label},
    "dict of tensors": lambda picture, label: {"img": pil_to_tensor(picture), "label": torch.tensor(label)},
}


class Pictures:
    classes = ("cat", "dog")

    def __init__(self, folder: Path, kind: str, tells: bool = True) -> None:
        self.files = sorted(folder.glob("*/*.png"))
        self.make = kind
        if tells:
            self.targets = [int(file.parent.name == "dog") for file in self.files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        file = self.files[index]
        return KINDS[self.make](Image.open(file), int(file.parent.name == "dog"))


class OneFile:
    """Of pictures in one open file: two threads would read each other's."""

    targets = tuple(range(40))

    def __init__(self) -> None:
        self._at = 0

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        self._at = index
        time.sleep(0.002)
        return Image.new("RGB", (8, 8), (self._at, 0, 0)), index


def test_blocks_of_a_dataset_with_one_open_file_hold_its_pictures(tmp_path: Path) -> None:
    data = ImageData(DatasetImages(OneFile(), size=8), Transforms(), str(tmp_path))
    list(data.write(tmp_path / "set", "stream", 0.0005))
    streamed = ImageData(StreamImages(str(tmp_path / "set"), cache=str(tmp_path / "cache")), Transforms())
    streamed.prepare(World(), 0)
    for batch, labels in streamed.train_batches(Sampler(36, 36, seed=5), range(1)):
        assert (batch[:, 0].amax(dim=(1, 2)) * 58.4 + 123.7).round().tolist() == labels.tolist()


class Turned(Pictures):
    """With a random transform of its own."""

    def __getitem__(self, index: int) -> Any:
        picture, label = super().__getitem__(index)
        return picture.rotate(float(torch.rand(()))), label


class Columns(Pictures):
    """With columns, as Hugging Face's datasets have them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "dict", tells=False)
        self.features = {"image": "picture", "label": "class"}
        self.reads = 0

    def with_format(self, format: None) -> "Columns":
        return self

    def __getitem__(self, index: int | str) -> Any:
        if index == "label":
            return [int(file.parent.name == "dog") for file in self.files]
        self.reads += 1
        return super().__getitem__(int(index))


class Odd:
    """Samples of no use."""

    def __init__(self, sample: Any, labels: list[int] | None = None) -> None:
        self.sample = sample
        self.targets = labels or [0, 1] * 10

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.sample, Exception):
            raise self.sample
        return self.sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, draw = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for name in Pictures.classes:
        (root / name).mkdir()
        for i in range(20):  # every tenth is held out, of each class and of all: 9, 19, 29, 39
            pixels = draw.integers(0, 256, (*draw.integers(30, 60, 2), 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i:02}.png")
    return root


def read(dataset: Odd, i: int) -> Tensor:
    """The i-th training picture."""
    return DatasetImages(dataset).open(Path()).train.images(torch.tensor([i]))


def batches(source: ImageSource, root: Path, workers: int = 0) -> list[tuple[Tensor, Tensor]]:
    augment = Transforms({"flip": v2.RandomHorizontalFlip()}, RandomResizedCrop())
    data = ImageData(source, augment, root=str(root), workers=workers)
    data.prepare(World(), 7)
    valid = list(data.valid_batches([range(4)]))
    return [*data.train_batches(Sampler(data.train_size, 12, 7), range(4)), *valid]


SLOW = {(kind, 2) for kind in ("tensor", "array", "dict")}
"""To start workers takes seconds."""
READ = [
    pytest.param(kind, workers, marks=[pytest.mark.long] * ((kind, workers) in SLOW))
    for kind in KINDS
    for workers in (0, 2)
]


@pytest.mark.parametrize(("kind", "workers"), READ)
@pytest.mark.parametrize(("resize", "tells"), [(None, True), pytest.param(32, False, marks=pytest.mark.long)])
def test_they_are_those_of_files(
    folder: Path, kind: str, workers: int, resize: int | None, tells: bool
) -> None:
    wanted = batches(ImageFolder(24, resize=resize), folder)
    source = DatasetImages(Pictures(folder, kind, tells), size=24, resize=resize)
    for one, other in zip(wanted, batches(source, folder, workers), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_random_transform_of_its_own_is_refused(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"data\.source\.dataset: Turned draws random numbers .* data=dataset"
    ):
        DatasetImages(Turned(folder, "Pillow")).open(folder)
    with pytest.raises(UserError, match=r"data\.source\.valid: Turned draws random numbers"):
        DatasetImages(Pictures(folder, "Pillow"), Turned(folder, "Pillow")).open(folder)


def test_labels_of_a_column_are_had_without_decoding_the_pictures(folder: Path) -> None:
    dataset = Columns(folder)
    opened = DatasetImages(dataset, size=24).open(folder)
    assert dataset.reads <= 1, "the first, to see whether it draws"
    told = DatasetImages(Pictures(folder, "Pillow"), size=24).open(folder)
    assert torch.equal(opened.train.labels, told.train.labels)
    assert torch.equal(opened.valid.images(torch.arange(2)), told.valid.images(torch.arange(2)))


def test_blocks_hold_whole_pictures(folder: Path, tmp_path: Path) -> None:
    source = DatasetImages(Pictures(folder, "tensor"), size=8, resize=9)
    written = source.open(folder).train
    for i in range(3):
        with Image.open(BytesIO(written.encoded(i))) as stored, Image.open(folder / f"cat/{i:02}.png") as own:
            assert np.array_equal(np.asarray(stored), np.asarray(own))


def test_one_that_processes_can_not_be_given_is_named(folder: Path) -> None:
    own = Pictures(folder, "Pillow")
    own.lock = threading.Lock()  # type: ignore[attr-defined]
    source = DatasetImages(own, size=24)
    said = r"^data\.workers: the data can't be sent to loader processes \(cannot pickle"
    with pytest.raises(UserError, match=said):
        batches(source, folder, workers=1)
    with pytest.raises(UserError, match=said):
        opened_set(source, folder, "skip", World(), 1)
    mixed = ImageData(source, Transforms(mix=Mix()), root=str(folder), workers=1, resident=False)
    with pytest.raises(UserError, match=said):
        mixed.prepare(World(), 7)
    assert len(batches(source, folder)) == 5


def test_a_validation_set_of_its_own_and_classes_by_number(folder: Path) -> None:
    own = Pictures(folder, "Pillow")
    found = DatasetImages(own, valid=own, classes=5, size=8).open(folder)
    assert (len(found.train), len(found.valid), list(found.classes)) == (40, 40, list("01234"))


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda: DatasetImages([], valid=5), "data.source.valid: int is not map-style"),  # type: ignore[arg-type]
        (lambda: DatasetImages(Odd(1), size=0), "data.source.size=0: must be 1 pixel or more."),
        (
            lambda: DatasetImages(Subset(Odd((torch.zeros(3, 4, 4), 0)), range(8))).open(Path()),
            "data.source.dataset: every tenth of its samples is held out for validation, and it has 8.",
        ),
        (lambda: DatasetImages(Odd(1), classes=1).open(Path()), "data.source.classes=1: must be 2 or more."),
        (
            lambda: DatasetImages(Odd(1, [0, 7] * 10), classes=3).open(Path()),
            "data.source.dataset: labels must be 0 to 2, for 3 classes, and are 0 to 7.",
        ),
        (
            lambda: read(Odd((1, 2, 3)), 0),
            "data.source.dataset: sample 0 can't be used (it must be (picture, label), or a dict with image",
        ),
        (
            lambda: (
                DatasetImages(Odd((torch.zeros(3, 4, 4), 0))).open(Path()).train.images(torch.tensor([1]))
            ),
            "data.source.dataset: sample 1 can't be used (its picture must be Pillow's, or of uint8;",
        ),
        (
            lambda: (
                DatasetImages(Odd(FileNotFoundError("x.jpg"))).open(Path()).train.images(torch.tensor([10]))
            ),
            "data.source.dataset: sample 11 can't be used (x.jpg).",  # 9 is held out
        ),
    ],
)
def test_what_is_wrong_is_named(use: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError) as refused:
        use()
    assert str(refused.value).startswith(said)


MISTAKES = """
import torch
from torch.utils.data import IterableDataset
class Endless(IterableDataset):
    def __iter__(self): return iter([])
class NoLength:
    def __getitem__(self, i): return torch.zeros(3, 8, 8, dtype=torch.uint8), i % 2
class BadLength(NoLength):
    def __len__(self): raise NotImplementedError("no length")
class Empty(NoLength):
    def __len__(self): return 0
class Words(Empty):
    def __len__(self): return 20
    def __getitem__(self, i): return "x"
class Torn(Words):
    def __getitem__(self, i): return open(f"/proc/nowhere/{i}")
class Gone(Words):
    def __init__(self): open("/proc/nowhere")
class Folder(Words):
    def __init__(self, folder): pass
def parts(): return {"train": Words(), "test": Words()}
def a_class(): return Words
def nothing(): return None
"""


@pytest.mark.parametrize("key", ["data.source.dataset", "data.source.valid"])
@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("Endless", "{key}: Endless is not map-style; it needs __len__ and __getitem__"),
        ("NoLength", "{key}: NoLength is not map-style; it needs __len__ and __getitem__"),
        ("nothing", "{key} (mistakes.nothing): returns None; it must return what it makes."),
        ("BadLength", "{key}: the length of BadLength can't be had (no length). Its __len__ must return"),
        ("a_class", "{key}: Words is not map-style"),
        ("parts", "{key}: dict has names (train, test) where a dataset has samples 0 to len - 1"),
        ("Empty", "{key}: Empty has no sample. Its __len__ says 0"),
        ("Words", "{key}: sample 0 can't be used (it must be (picture, label), or a dict with image"),
        ("Torn", "{key}: sample 0 can't be used ([Errno 2] No such file or directory: '/proc/nowhere/0')"),
        ("Gone", "{key} (mistakes.Gone): [Errno 2] No such file or directory: '/proc/nowhere'"),
        ("Folder", "{key}.folder: mistakes.Folder needs it; set {key}.folder=..."),
        ("Fodler", "{key}._target_=mistakes.Fodler: mistakes has no Fodler."),
    ],
)
def test_a_dataset_of_no_use_is_told_by_its_key(
    target: str, said: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mistakes", raising=False)
    open_package("mistakes")
    node: dict[str, Any] = {
        "_target_": "ddptrain.data.images.dataset.DatasetImages",
        "dataset": {"_target_": "torchvision.datasets.FakeData", "size": 20, "num_classes": 2},
    }
    node[key.rpartition(".")[2]] = {"_target_": f"mistakes.{target}"}
    problems = check_node(node, "data.source")
    if not problems:
        with pytest.raises(UserError) as refused:
            build(node, "data.source").open(tmp_path)
        problems = [str(refused.value)]
    assert problems[0].startswith(said.format(key=key))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "data=image_dataset",
            "data.source.dataset._target_: has no value, and needs one: data.source.dataset._target_=...",
        ),
        (
            "data=image_dataset data.source.dataset=my_code.Birds",
            "data.source.dataset=my_code.Birds: must be keys with a _target_ (MapStyle). Did you mean"
            " data.source.dataset._target_=my_code.Birds?",
        ),
        (
            "data=dataset data.dataset=my_code.Birds",
            "data.dataset=my_code.Birds: must be keys with a _target_ (MapStyle). Did you mean"
            " data.dataset._target_=my_code.Birds?",
        ),
    ],
)
def test_a_dataset_that_is_named_wrongly_is_told_by_its_key(tmp_path: Path, words: str, said: str) -> None:
    assert refusal(tmp_path, f"recipe=cnn_digits {words}").startswith(said)


@pytest.mark.long
def test_one_rank_at_a_time_makes_a_dataset_that_downloads(tmp_path: Path) -> None:
    """As torchvision's do in their constructors, without a lock."""
    (tmp_path / "fetching.py").write_text("""
import time
from pathlib import Path

from PIL import Image


class Fetched:
    targets = tuple(i % 2 for i in range(20))

    def __init__(self, download: bool = False) -> None:
        Path("unpacking").touch(exist_ok=False)
        time.sleep(0.5)
        Path("unpacking").unlink()

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index):
        return Image.new("RGB", (32, 32), (9 * index, 0, 0)), self.targets[index]
""")
    words = (
        "recipe=cnn_cifar10 data=image_dataset data.source.dataset._target_=fetching.Fetched"
        " +data.source.dataset.download=true data.source.size=32 data.workers=0 train.batch_size=4"
        " train.steps=1 device=cpu observers=[] run.dir=run"
    )
    ended = under_torchrun(tmp_path, 3, f"-m ddptrain {words}")
    assert ended.code == 0, ended.err[-3000:]


@pytest.mark.long
def test_torchvisions_own_is_fine_tuned_and_asked(tmp_path: Path, folder: Path) -> None:
    one = {"OMP_NUM_THREADS": "1"}
    words = (
        "launch --nproc-per-node=2 recipe=finetune data=image_dataset data.source.size=24 device=cpu"
        f" data.source.dataset._target_=torchvision.datasets.ImageFolder +data.source.dataset.root={folder}"
        " model.name=resnet18 init.weights=null train.batch_size=8 train.steps=2 run.dir=run"
    )
    done = ddptrain(tmp_path, words, **one)
    assert done.code == 0, done.err
    assert "dataset: 36 train, 4 valid (every tenth, held out), 2 classes, 24x24x3" in done.err
    asked = ddptrain(tmp_path, f"predict run=run source={folder}/cat", **one)
    assert asked.code == 0, asked.err
    assert len(asked.out.splitlines()) == 21
