"""Pictures and their masks: found, checked, moved together, and brought into squares as documented."""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from masked import CLASSES, mask_set, save, scene
from PIL import Image, ImageOps
from torch import Tensor

from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.masks.data import DecodedPairs, MaskData, MaskTransform
from ddptrain.data.masks.files import Pair, blended, read_pair
from ddptrain.data.pipeline import Samples
from ddptrain.data.workers import Key
from ddptrain.errors import UserError

SEED, BATCH, STEPS = 9, 5, range(2, 7)
"""Five batches of 5 out of 12 samples reach over an epoch's end."""
Batches = list[tuple[Tensor, Tensor]]
FILL = (124, 116, 104)


def prepared(root: Path, workers: int = 0, size: int = 48, **arguments: Any) -> MaskData:
    data = MaskData(str(root), size, workers=workers, **arguments)
    data.prepare(World(), seed=SEED)
    return data


def batches(data: MaskData, steps: range = STEPS, world_size: int = 1, rank: int = 0) -> Batches:
    sampler = Sampler(data.train_size, BATCH, SEED, rank=rank, world_size=world_size)
    return list(data.train_batches(sampler, steps))


def assert_equal(ones: Batches, others: Batches) -> None:
    for one, other in zip(ones, others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_ranks_workers_and_where_the_steps_begin_change_no_bit(tmp_path: Path) -> None:
    data = prepared(mask_set(tmp_path))
    alone = batches(data)
    for world_size in (2, 3):
        ranks = [batches(data, STEPS, world_size, rank) for rank in range(world_size)]
        together = [tuple(map(torch.cat, zip(*parts, strict=True))) for parts in zip(*ranks, strict=True)]
        assert_equal(alone, together)  # type: ignore[arg-type]
    assert_equal(alone[2:], batches(data, range(4, 7)))
    helped = prepared(tmp_path, workers=2)
    assert_equal(alone, batches(helped))
    chunks = [range(3), range(3, 4)]
    assert_equal(list(data.valid_batches(chunks)), list(helped.valid_batches(chunks)))


def test_a_picture_of_any_program_is_prepared_as_in_evaluation(tmp_path: Path) -> None:
    data = prepared(mask_set(tmp_path))
    [(images, _)] = data.valid_batches([range(4)])
    for i, file in enumerate(sorted((tmp_path / "val/images").iterdir())):
        assert torch.equal(data.preprocess(file), images[i : i + 1])
        with Image.open(file) as picture:
            assert torch.equal(data.preprocess(picture), images[i : i + 1])


@pytest.mark.parametrize("size", [48, 64, 100])
@pytest.mark.parametrize("turned", [False, True])
def test_evaluation_scales_to_the_longer_side_and_fills_the_rest(
    size: int, turned: bool, tmp_path: Path
) -> None:
    """As docs/segmentation.md says, for both formats; the mask pixel by pixel."""
    picture, mask = scene(3, 64, 41)
    palette = mask.copy()
    palette.putpalette([17] * 768)
    for part in ("train", "val"):
        save(tmp_path / part, "a", picture, palette)
        save(tmp_path / part, "b", picture, mask)
    if turned:  # stored lying down, seen upright; its mask as it is seen
        tag = Image.Exif()
        tag[0x0112] = 6
        stored = picture.transpose(Image.Transpose.ROTATE_90)
        stored.save(tmp_path / "val/images/a.png", exif=tag)
    data = prepared(tmp_path, size=size, classes=3)
    [(images, labels)] = data.valid_batches([range(2)])
    height = round(41 * size / 64)
    square = np.empty((size, size, 3), dtype=np.uint8)
    square[:] = FILL
    square[:height] = np.asarray(picture.resize((size, height), Image.Resampling.BILINEAR))
    truth, drawn = np.full((size, size), 255), np.asarray(mask)
    truth[:height] = np.asarray(mask.resize((size, height), Image.Resampling.NEAREST))
    for y, x in np.ndindex(height, size):  # nearest, but where two are as near
        row, column = (y + 0.5) * 41 / height, (x + 0.5) * 64 / size
        if row % 1 and column % 1:
            assert truth[y, x] == drawn[int(row), int(column)]
    for i in range(2):
        assert torch.equal(images[i], data.normalised(torch.from_numpy(square)[None])[0])
        assert labels[i].tolist() == truth.tolist()
    about = data.preparation()
    pixels = square.astype(np.float32)
    by_hand = (pixels - np.float32(about["mean"])) / np.float32(about["std"])
    np.testing.assert_allclose(images[0].permute(1, 2, 0).numpy(), by_hand, atol=1e-6)


def test_a_mask_moves_with_its_picture(tmp_path: Path) -> None:
    """Inside of its areas, in any window, at any scale, mirrored or not, a class has its colour."""
    data = prepared(mask_set(tmp_path), size=64)
    colours = torch.tensor([(40, 60, 50), (220, 60, 40), (60, 90, 230)])
    mean, std = (torch.tensor(data.preparation()[name]) for name in ("mean", "std"))
    compared = 0
    for images, labels in batches(data, range(20)):
        pixels = images.permute(0, 2, 3, 1) * std + mean
        around = labels.float()[:, None]
        largest = torch.nn.functional.max_pool2d(around, 7, 1, 3)
        least = -torch.nn.functional.max_pool2d(-around, 7, 1, 3)
        inside = (largest == least)[:, 0] & (labels < 3)
        inside[:, [0, 1, 2, -3, -2, -1]] = inside[:, :, [0, 1, 2, -3, -2, -1]] = False
        assert (pixels[inside] - colours[labels[inside]]).abs().max() < 2
        compared += int((inside & (labels > 0)).sum())
    assert compared > 10_000


def test_scale_place_and_side_are_drawn_evenly_anew_in_each_epoch(tmp_path: Path) -> None:
    mask = Image.new("L", (64, 64), 0)
    mask.paste(1, (0, 0, 32, 64))
    save(tmp_path, "a", Image.new("RGB", (64, 64)), mask)
    pair = Pair(tmp_path / "images/a.png", tmp_path / "masks/a.png")
    count = 400

    def drawn(scale: tuple[float, float], flip: float) -> Tensor:
        samples = Samples(DecodedPairs([pair], 2), MaskTransform(64, scale, flip), seed=SEED)
        return samples.batch([Key(epoch, 0) for epoch in range(count)])[1]

    def about_evenly(values: Tensor) -> bool:
        """Of [0, 1]: the Kolmogorov-Smirnov distance, which 99.9 % of all draws stay below."""
        ordered = values.double().sort().values
        return bool((ordered - (torch.arange(count) + 0.5) / count).abs().max() < 1.95 / count**0.5)

    masks = drawn((0.5, 1.0), 0.3)
    sides = (masks != 255).flatten(1).sum(dim=1).double().sqrt()
    assert about_evenly((sides - 32) / 32)
    mirrored = (masks[:, 0] == 1).double().argmax(dim=1) > 0
    assert abs(float(mirrored.double().mean()) - 0.3) < 0.1
    ones = (drawn((2.0, 2.0), 0.0)[:, 0] == 1).sum(dim=1)  # columns of the left half: the window's place
    assert about_evenly(1 - ones.double() / 64)
    assert drawn((2.0, 2.0), 0.0).ne(255).all()


def test_layouts(tmp_path: Path) -> None:
    for name in ("valid", "validation", "test"):
        root = mask_set(tmp_path / name)
        (root / "val").rename(root / name)
        data = prepared(root)
        assert (data.train_size, data.valid_size, data.classes) == (12, 4, CLASSES)
    flat = tmp_path / "flat"
    for i in range(23):
        save(flat / "train" if i < 0 else flat, f"city{i % 2}_{i:02}", *scene(i, 40, 40))
    (flat / "images/deep").mkdir()
    (flat / "masks/deep").mkdir()
    for kind in ("images", "masks"):
        (flat / kind / "city1_21.png").rename(flat / kind / "deep/z.png")
    data = prepared(flat, classes=list(CLASSES))
    assert (data.train_size, data.valid_size) == (21, 2)
    [(_, labels)] = data.valid_batches([range(2)])
    names = sorted(path.relative_to(flat / "images") for path in (flat / "images").rglob("*.png"))
    for name, label in zip((names[9], names[19]), labels, strict=True):
        scaled = Image.open(flat / "masks" / name).resize((48, 48), Image.Resampling.NEAREST)
        assert label.tolist() == np.asarray(scaled).tolist()


def test_identity_metadata_and_preview(tmp_path: Path) -> None:
    data = prepared(mask_set(tmp_path))
    assert data.identity == prepared(tmp_path, workers=2).identity != prepared(tmp_path, size=64).identity
    picture, mask = scene(99, 64, 64)
    save(tmp_path / "train", "000", picture, mask)
    assert prepared(tmp_path).identity != data.identity
    recalled = MaskData(str(tmp_path / "nowhere"), size=99)
    recalled.load_metadata(data.metadata(), World())
    assert (recalled.classes, recalled.size) == (CLASSES, 48)
    assert recalled.preparation() == data.preparation()
    preview = data.preview()
    assert preview.shape == (12, 3, 48, 48)
    assert preview.dtype == torch.uint8


def test_colours_are_pascal_vocs() -> None:
    grey = torch.full((3, 1, 4), 100, dtype=torch.uint8)
    seen = blended(grey, torch.tensor([[0, 1, 15, 255]]))[:, 0].T.tolist()
    voc = [(0, 0, 0), (128, 0, 0), (192, 128, 128), (224, 224, 192)]
    assert seen == [[50 + level // 2 for level in colour] for colour in voc]


def change(kind: str, name: str, image: Image.Image) -> Callable[[Path], None]:
    return lambda root: image.save(root / kind / name)


def removed(name: str) -> Callable[[Path], None]:
    return lambda root: (root / name).unlink()


def classes(text: str) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        (root / "classes.txt").write_text(text)

    return write


def emptied(folder: str) -> Callable[[Path], None]:
    def empty(root: Path) -> None:
        for file in (root / folder).iterdir():
            file.unlink()

    return empty


EARLY: list[tuple[Callable[[Path], Any], str]] = [
    (removed("train/masks/003.png"),
     r"train/images: 1 of 12 pictures have no mask: 003\.png\. .* needs .*train/masks/003\.png"),
    (emptied("val/masks"), r"val/images: 4 of 4 pictures have no mask: 000\.png, 001\.png, 002\.png"),
    (emptied("train/images"), r"train/images: holds no picture \(\.jpg,"),
    (lambda root: (root / "val/masks").rename(root / "val/labels"),
     r"data\.root: there is no folder .*val/masks\. It must hold"),
    (lambda root: (root / "train").rename(root / "training"),
     r"data\.root: there is no folder .*/images\. It must hold"),
    (lambda root: (root / "val").rename(root.parent / "gone") and emptied_to(root, 9),
     r"holds 9 pictures, and every tenth"),
    (lambda root: scene(1, 64, 64)[0].save(root / "train/images/003.jpg"),
     r"003\.jpg and 003\.png differ in their ending only"),
    (lambda root: (root / "train/masks/003.PNG").write_bytes(b""),
     r"003\.PNG and 003\.png differ in their ending only"),
    (lambda root: [(root / "train" / kind).rename(root / kind) for kind in ("images", "masks")]
     and (root / "train").rmdir(), r"holds val, and no train"),
    (removed("classes.txt"), r"data\.classes=null: .*classes\.txt, which does not exist\. Write one name a"),
    (classes("only\n"), r"classes\.txt: has 1 classes; must be 2 to 255"),
    (classes("cat\n\ndog\n"), r"classes\.txt: class 1 is called ''; give it a name of its own"),
    (classes("cat\ndog\ncat\n"), r"classes\.txt: class 2 is called 'cat'"),
]  # fmt: skip


def emptied_to(root: Path, count: int) -> None:
    for kind in ("images", "masks"):
        for file in sorted((root / "train" / kind).iterdir())[count:]:
            file.unlink()


@pytest.mark.parametrize(("mistake", "message"), EARLY)
def test_what_the_names_tell_is_refused_before_training(
    mistake: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    root = mask_set(tmp_path / "set")
    mistake(root)
    with pytest.raises(UserError, match=message) as refused:
        prepared(root)
    assert "\n" not in str(refused.value)
    assert refused.value.everywhere


def grey_png(file: Path, width: int, height: int, bits: int, pixels: bool = True) -> None:
    """All pixels at its top level, which is 255 of a picture; Pillow itself writes none of so few bits, and
    none without pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    rows = (b"\0" + b"\xff" * (width * bits // 8)) * height
    chunks = [(b"IHDR", head), *[(b"IDAT", zlib.compress(rows))] * pixels, (b"IEND", b"")]
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*one) for one in chunks))


def test_a_mask_is_turned_as_its_tag_says(tmp_path: Path) -> None:
    """As every other picture is, and as people see it."""
    picture, mask = scene(3, 48, 48)
    exif = Image.Exif()
    for orientation in range(1, 9):
        exif[0x0112] = orientation
        for kind, image in (("picture", picture), ("mask", mask)):
            image.save(tmp_path / f"{kind}.png", exif=exif)
        files = Pair(tmp_path / "picture.png", tmp_path / "mask.png")
        seen, classes = read_pair(files, 3)
        with Image.open(tmp_path / "mask.png") as opened:
            assert classes.tobytes() == ImageOps.exif_transpose(opened).tobytes()
        assert seen.size == classes.size


def test_what_is_not_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = mask_set(tmp_path)
    for name in ("train/masks/more.png", "val/images/a.gif", "val/images/.hidden/000.png"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"")
    with caplog.at_level("INFO", logger="ddptrain"):
        assert prepared(root).valid_size == 4
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert f"{root}/train/masks: 1 masks have no picture in {root}/train/images: more.png" in told
    assert f"{root}/val/images: 1 file not read (not .jpg" in told
    assert told.endswith(": a.gif")


PICTURE, MASK = scene(5, 64, 59)
FOUND: list[tuple[Callable[[Path], Any], str]] = [
    (change("train/masks", "005.png", Image.new("L", (64, 59), 3)),
     r"masks/005\.png: has pixels of value 3, which is no class: there are 3, 0 to 2, and 255"),
    (change("train/masks", "005.png", MASK.resize((59, 64))),
     r"masks/005\.png: has 59x64 pixels, and .*images/005\.png .* 64x59\."),
    (change("train/masks", "005.png", PICTURE),
     r"masks/005\.png: has pixels of mode RGB; a mask must be a grey or palette PNG of 8 bits"),
    (change("train/masks", "005.png", MASK.convert("1")), r"masks/005\.png: has pixels of mode 1;"),
    (lambda root: MASK.save(root / "train/masks/005.png", format="JPEG"),
     r"masks/005\.png: is a JPEG file; a mask must be a grey or palette PNG of 8 bits"),
    (lambda root: grey_png(root / "train/masks/005.png", 64, 59, bits=2),
     r"masks/005\.png: has grey pixels of less than 8 bits"),
    (lambda root: grey_png(root / "train/masks/005.png", 64, 59, bits=4),
     r"masks/005\.png: has grey pixels of less than 8 bits"),
    (lambda root: grey_png(root / "train/masks/005.png", 64, 59, 8, pixels=False),
     r"masks/005\.png: can't be read"),
    (lambda root: (root / "train/masks/005.png").write_bytes(b"none"),
     r"masks/005\.png: can't be read as an image"),
    (lambda root: (root / "train/images/005.png").write_bytes(b"none"),
     r"images/005\.png: can't be read as an image"),
]  # fmt: skip


@pytest.mark.parametrize(("mistake", "message"), FOUND)
def test_what_only_reading_tells_names_its_file(
    mistake: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    root = mask_set(tmp_path / "set")
    mistake(root)
    with pytest.raises(UserError, match=message) as refused:
        batches(prepared(root), range(3))
    assert "\n" not in str(refused.value)
    assert not refused.value.everywhere


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 31}, r"data\.size=31: must be 32 to 4096 pixels"),
        ({"scale": (2.0, 0.5)}, r"data\.scale=\[2\.0,0\.5\]: must be a least and a most share"),
        ({"horizontal_flip": 1.5}, r"data\.horizontal_flip=1\.5: must be from 0"),
        ({"workers": -1}, r"data\.workers=-1"),
    ],
)
def test_wrong_options_name_their_key(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MaskData(**arguments)


@pytest.mark.parametrize("count", [1, 256])
def test_a_count_of_classes_fits_a_byte(count: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"data\.classes={count}: has {count} classes; must be 2 to 255"):
        prepared(mask_set(tmp_path), classes=count)


def test_there_is_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.root=.*nowhere: there is no such folder\. It must hold"):
        prepared(tmp_path / "nowhere")
