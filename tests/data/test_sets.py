"""The sets themselves: shapes, digits, CIFAR-10's archive, folders of pictures."""

import hashlib
import http.server
import io
import re
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from toy import Vectors

from ddptrain.api.world import World
from ddptrain.data.detection.drawn import DrawnScenes
from ddptrain.data.images.cifar10 import ARCHIVE, Cifar10
from ddptrain.data.images.folder import ImageFolder
from ddptrain.data.images.shapes import DISTANCES, Shapes
from ddptrain.distributed.comm import once_a_node
from ddptrain.errors import UserError
from ddptrain.run.setup import prepare
from ddptrain.testing import run_ranks

NOWHERE = Path("nowhere")


def test_shapes_follow_from_the_seed_alone() -> None:
    one, more, other = (
        Shapes(train=n, valid=7, seed=s).open(NOWHERE) for n, s in ((30, 0), (1200, 0), (30, 1))
    )
    ids = torch.arange(30)
    assert torch.equal(one.train.images(ids), more.train.images(ids))
    assert torch.equal(one.valid.labels, more.valid.labels)
    assert not torch.equal(one.train.images(ids), other.train.images(ids))
    assert not torch.equal(one.train.images(ids[:7]), one.valid.images(ids[:7]))


@pytest.mark.parametrize("n", [1, 7, 201])
def test_scenes_are_the_same_however_many_there_are(n: int) -> None:
    few, more = (DrawnScenes(count, 1, 64, masks=True).open(NOWHERE).train for count in (n, 210))
    for i, (one, other) in enumerate(zip(few.objects, more.objects, strict=False)):
        assert torch.equal(few.image(i), more.image(i))
        assert torch.equal(one.boxes, other.boxes)
        assert torch.equal(one.labels, other.labels)
        assert one.masks == other.masks


def test_shapes_are_what_their_statistics_say() -> None:
    opened = Shapes().open(NOWHERE)
    pixels = opened.train.images(torch.arange(len(opened.train))).float()
    assert pixels.mean(dim=(0, 1, 2)).tolist() == pytest.approx(list(opened.mean), abs=0.5)
    assert pixels.std(dim=(0, 1, 2)).tolist() == pytest.approx(list(opened.std), abs=0.5)
    shares = torch.bincount(opened.train.labels) / len(opened.train)
    assert len(shares) == len(DISTANCES) == 10
    assert shares.min() > 0.08


@pytest.mark.long
def test_a_linear_model_stays_under_60_percent_on_shapes() -> None:
    torch.manual_seed(0)
    opened = Shapes().open(NOWHERE)

    def flat(split: object, count: int) -> torch.Tensor:
        return (opened.train if split == "train" else opened.valid).images(torch.arange(count)).flatten(
            1
        ) / 127.5 - 1

    features, labels = flat("train", 10_000), opened.train.labels
    model = torch.nn.Linear(features.shape[1], 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1)
    for _ in range(8):
        for ids in torch.randperm(len(features)).split(200):
            torch.nn.functional.cross_entropy(model(features[ids]), labels[ids]).backward()
            optimizer.step()
            optimizer.zero_grad()
    accuracy = (model(flat("valid", 2_000)).argmax(1) == opened.valid.labels).float().mean().item()
    assert 0.15 < accuracy < 0.60


def archive(tmp_path: Path) -> Path:
    """A tiny archive in CIFAR-10's binary layout: 4 training images a file, 3 test images."""
    path = tmp_path / "served" / ARCHIVE
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as tar:
        for number, name in enumerate([*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]):
            count = 3 if name.startswith("test") else 4
            records = b"".join(
                bytes([(number + i) % 10]) + bytes([10 * number + i]) * 3072 for i in range(count)
            )
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(records)
            tar.addfile(member, io.BytesIO(records))
    return path


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """A loopback server of that archive: its URL, the file, and the requests it had."""
    path, requests = archive(tmp_path), []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(path.parent))  # type: ignore[arg-type]

        def log_message(self, *args: object) -> None:
            requests.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{ARCHIVE}", path, requests
        server.shutdown()


def test_cifar10_is_downloaded_once_a_node_and_read(
    tmp_path: Path, served: tuple[str, Path, list[str]]
) -> None:
    url, path, requests = served
    source = Cifar10(url, hashlib.sha256(path.read_bytes()).hexdigest())
    root = tmp_path / "data"

    def rank(world: World) -> list[int]:
        once_a_node(world, lambda: source.fetch(root))
        labels: list[int] = source.open(root).train.labels.tolist()
        return labels

    for labels in run_ranks(rank, 3):
        assert labels == [(number + i) % 10 for number in range(5) for i in range(4)]
    assert len(requests) == 1
    opened = source.open(root)
    assert opened.valid.images(torch.tensor([2])).unique().tolist() == [52]
    assert not list(root.glob("*.part"))


def test_what_is_not_the_archive_is_refused_and_not_kept(
    tmp_path: Path, served: tuple[str, Path, list[str]]
) -> None:
    with pytest.raises(UserError, match="cut short or another file"):
        Cifar10(served[0], "0" * 64).fetch(tmp_path / "data")
    assert [path.name for path in (tmp_path / "data").iterdir()] == [f".{ARCHIVE}.lock"]
    (tmp_path / "data" / ARCHIVE).write_bytes(b"something else")
    with pytest.raises(UserError, match="damaged or another file"):
        Cifar10(served[0], "0" * 64).fetch(tmp_path / "data")


def test_without_a_network_it_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"Put {ARCHIVE} into .*data/.*data=shapes"):
        Cifar10("http://127.0.0.1:9/nothing").fetch(tmp_path / "data")


def picture(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (40, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def test_a_folder_of_class_folders_holds_out_every_tenth(tmp_path: Path) -> None:
    for name, colour in (("b_red", (250, 0, 0)), ("a_blue", (0, 0, 250))):
        for i in range(20):
            picture(tmp_path / name / f"{i:02}.png", colour, (20 + i, 40))
    opened = ImageFolder(size=16).open(tmp_path)
    assert list(opened.classes) == ["a_blue", "b_red"]
    assert (len(opened.train), len(opened.valid)) == (36, 4)
    image = opened.train.images(torch.tensor([0]))
    assert image.shape == (1, 16, 16, 3)
    assert image[0, 5, 5].tolist() == [0, 0, 250]


def test_train_and_val_folders_are_used_as_they_are(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("val", 2)):
        for name in ("x", "y"):
            for i in range(count):
                picture(tmp_path / split / name / f"{i}.jpg", (9, 9, 9))
    opened = ImageFolder(size=8).open(tmp_path)
    assert (len(opened.train), len(opened.valid)) == (6, 4)


def test_train_without_val_holds_out_of_train(tmp_path: Path) -> None:
    for name in ("x", "y"):
        for i in range(10):
            picture(tmp_path / "train" / name / f"{i}.png", (9, 9, 9))
    opened = ImageFolder(size=8).open(tmp_path)
    assert list(opened.classes) == ["x", "y"]
    assert (len(opened.train), len(opened.valid)) == (18, 2)


def test_one_class_is_refused(tmp_path: Path) -> None:
    for i in range(10):
        picture(tmp_path / "only" / f"{i}.png", (9, 9, 9))
    with pytest.raises(UserError, match="one class, 'only'"):
        ImageFolder().open(tmp_path)


def test_grey_transparent_and_palette_pictures_become_rgb(tmp_path: Path) -> None:
    for i, mode in enumerate(("L", "RGBA", "P", "1", "I;16")):
        for name in ("a", "b"):
            path = tmp_path / name / f"{i}.png"
            path.parent.mkdir(exist_ok=True)
            Image.new(mode, (12, 12)).save(path)
            Image.new("RGB", (12, 12)).save(tmp_path / name / f"x{i}.bmp")
    opened = ImageFolder(size=8).open(tmp_path)
    assert opened.train.images(torch.arange(len(opened.train))).shape[1:] == (8, 8, 3)


def test_a_class_of_val_that_train_lacks_is_named(tmp_path: Path) -> None:
    picture(tmp_path / "train" / "x" / "0.png", (0, 0, 0))
    picture(tmp_path / "val" / "z" / "0.png", (0, 0, 0))
    with pytest.raises(UserError, match="'z'"):
        ImageFolder().open(tmp_path)


@pytest.mark.parametrize(("train", "valid", "named"), [(100, 0, "validation"), (0, 100, "training")])
def test_an_empty_set_is_refused_whoever_wrote_the_data(train: int, valid: int, named: str) -> None:
    with pytest.raises(UserError, match=f"^data: the {named} set is empty"):
        prepare(Vectors(train, valid), World(), seed=0)


class Knowing(Vectors):
    """Has something for checkpoints."""

    def __init__(self, known: Any) -> None:
        super().__init__(20, 10)
        self.known = known

    def metadata(self) -> Any:
        return self.known


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (
            {"names": ["a", "b"], "size": (2, 3), "deep": {"er": [{"est": None}]}, "half": 0.5, "is": True},
            None,
        ),
        ({}, None),
        ({0: "cat"}, "Knowing.metadata() has the key 0 (int)"),
        ({"names": {0: "cat", 1: "dog"}}, "Knowing.metadata()['names'] has the key 0 (int)"),
        ({"a": [{"b": {True: 1}}]}, "Knowing.metadata()['a'][0]['b'] has the key True (bool)"),
        ({"a": {None: 1}}, "Knowing.metadata()['a'] has the key None (NoneType)"),
        ({"a": {("x", "y"): 1}}, "Knowing.metadata()['a'] has the key ('x', 'y') (tuple)"),
        ({"mean": torch.zeros(3)}, "Knowing.metadata()['mean'] is of the kind Tensor"),
        ({"names": {"a", "b"}}, "Knowing.metadata()['names'] is of the kind set"),
    ],
)
def test_what_a_checkpoint_would_give_back_otherwise_is_refused(known: Any, said: str | None) -> None:
    """Else the run would be other data than itself."""
    if said is None:
        prepare(Knowing(known), World(), seed=0)
        return
    with pytest.raises(UserError, match=re.escape(f"data: {said}")):
        prepare(Knowing(known), World(), seed=0)
