"""What a trained image classifier says of any pictures, and what it says as a file. The set it was trained on
is gone by then."""

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from labelled import truncate
from PIL import Image
from shell import Ended, ddptrain
from torch import Tensor, nn
from torchvision.transforms.v2.functional import to_pil_image

from ddptrain.api.recipe import Deployed
from ddptrain.data.images.digits import Digits
from ddptrain.data.images.folder import ImageFolder
from ddptrain.data.images.source import Split
from ddptrain.data.pictures import fitted
from ddptrain.engine.saved_checkpoint import sealed
from ddptrain.errors import ExitCode, UserError
from ddptrain.python.load import load
from ddptrain.run.file_formats import FORMATS
from ddptrain.verbs.main import main

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SIDE = 24
WORDS = (
    "device=cpu data.workers=0 train.batch_size=16 train.steps=24 train.eval_every=12 checkpoint.every=12"
    " optim.lr=0.01"
)
Refused = Callable[[Path, str], str]
MODES = ("L", "RGB", "RGBA", "P", "LA", "1", "CMYK", "I;16")


def saved(split: Split, classes: list[str], folder: Path) -> None:
    """Each picture as a PNG: ``<number>-<class>.png``."""
    folder.mkdir(parents=True)
    for i, label in enumerate(split.labels.tolist()):
        pixels = split.images(torch.tensor([i]))[0].permute(2, 0, 1)
        to_pil_image(pixels).save(folder / f"{i:04}-{classes[label]}.png")


def trained(folder: Path, words: str, ranks: int = 1) -> None:
    """``folder/run``."""
    given = f"{words} {WORDS} run.dir=run"
    start = f"launch --nproc-per-node={ranks} {given}" if ranks > 1 else given
    done = ddptrain(folder, start, **ONE_THREAD)
    assert done.code == 0, done.err


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run, of two DDP ranks, and pictures: the validation set. One channel."""
    folder = tmp_path_factory.mktemp("digits")
    opened = Digits().open(folder)
    saved(opened.valid, list(opened.classes), folder / "pictures")
    trained(folder, "recipe=cnn_digits ema.decay=0.9", ranks=2)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run, by strategy=dp, of a folder of class folders that has been moved to ``moved``."""
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for part, count in (("train", 24), ("val", 10)):
        for label, name in enumerate(("warm", "cold", "green things")):
            (folder / "set" / part / name).mkdir(parents=True)
            for i in range(count):
                height, width = (int(side) for side in generator.integers(20, 60, 2))
                pixels = generator.integers(0, 120, (height, width, 3), dtype=np.uint8)
                pixels[:, :, (0, 2, 1)[label]] += 60
                Image.fromarray(pixels).save(folder / "set" / part / name / f"{i}.{('png', 'jpg')[i % 2]}")
    recipe = f"recipe=cnn_cifar10 data=imagefolder data.root=set data.source.size={SIDE} strategy=dp"
    trained(folder, recipe)
    (folder / "set").rename(folder / "moved")
    return folder


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Refused:
    """The message with which a command line is refused, in this process: that saves seconds."""

    def run(cwd: Path, words: str) -> str:
        monkeypatch.chdir(cwd)
        assert main(words.split()) == ExitCode.USER_ERROR
        return capfd.readouterr().err.rpartition("ddptrain: ")[2]

    return run


def predict(cwd: Path, words: str | Sequence[str]) -> Ended:
    done = ddptrain(cwd, ["predict", *(words.split() if isinstance(words, str) else words)], **ONE_THREAD)
    assert done.code == 0, done.err
    return done


def table(out: Path) -> list[dict[str, str]]:
    with (out / "predictions.csv").open(newline="") as rows:
        return list(csv.DictReader(rows))


def accuracy(folder: Path) -> float:
    summary = json.loads((folder / "run/summary.json").read_text())
    return float(summary["metrics"]["accuracy"])


# -- predict ----------------------------------------------------------------------------------------


@pytest.mark.long
def test_pictures_of_the_validation_set_are_answered_as_in_its_evaluation(
    digits: Path, tmp_path: Path
) -> None:
    done = predict(tmp_path, f"run={digits}/run checkpoint=last source={digits}/pictures out=new/seen")
    rows = table(tmp_path / "new/seen")
    right = [Path(row["file"]).stem.partition("-")[2] == row["label_1"] for row in rows]
    assert sum(right) / len(right) == pytest.approx(accuracy(digits), abs=1e-12)
    assert 0.2 < accuracy(digits) < 1
    *lines, last = done.out.splitlines()
    assert len(lines) == len(rows) == 359
    assert last == "new/seen: predictions.csv and 12 sheets of 359 pictures"
    for line, row in zip(lines, rows, strict=True):
        assert line.startswith(f"{row['file']}: {row['label_1']} ")
        shares = [float(row[f"probability_{n}"]) for n in (1, 2, 3)]
        assert 1 >= shares[0] >= shares[1] >= shares[2] >= 0
    sheets = sorted((tmp_path / "new/seen").glob("sheet-*.png"))
    assert [sheet.name for sheet in sheets][::11] == ["sheet-001.png", "sheet-012.png"]
    with Image.open(sheets[0]) as sheet:
        assert np.asarray(sheet).std() > 20  # pictures, not a blank


def test_the_probability_is_that_of_the_evaluated_model(photos: Path, tmp_path: Path) -> None:
    """By all classes, from photographs of any size."""
    predict(tmp_path, f"run={photos}/run source={photos}/moved/val/**/* top=9 checkpoint=last")
    rows = table(tmp_path / "predictions")
    assert len(rows) == 30
    assert sum(row["label_1"] in Path(row["file"]).parts for row in rows) / 30 == pytest.approx(
        accuracy(photos)
    )
    assert list(rows[0]) == ["file", *(f"{n}_{i}" for i in (1, 2, 3) for n in ("label", "probability"))]
    sums = [sum(float(row[f"probability_{i}"]) for i in (1, 2, 3)) for row in rows]
    assert sums == pytest.approx([1] * 30, abs=3 * 0.5e-6), "three numbers of six digits"
    model = load(photos / "run", checkpoint="last")
    for row in rows[::7]:
        said = model.predict(row["file"])
        assert list(said) == [row[f"label_{i}"] for i in (1, 2, 3)]
        shares = [float(row[f"probability_{i}"]) for i in (1, 2, 3)]
        assert [*said.values()] == pytest.approx(shares, abs=1e-6)
        with Image.open(row["file"]) as picture:
            assert model.predict(picture) == said
    opened = ImageFolder(SIDE).open(photos / "moved")
    seen = {tuple(opened.valid.images(torch.tensor([i])).flatten().tolist()) for i in range(30)}
    files = [Path(row["file"]) for row in rows]
    assert {tuple(fitted(file, (SIDE, SIDE, 3)).flatten().tolist()) for file in files} == seen


def all_kinds(folder: Path) -> None:
    """A picture of every mode, of extreme sizes and turned by its EXIF tag."""
    folder.mkdir()
    grey = Image.linear_gradient("L").resize((90, 40))
    for mode in MODES:
        ending = "tif" if mode == "CMYK" else "png"
        deep = Image.fromarray(np.asarray(grey, dtype=np.uint16) * 257)
        picture = deep if mode == "I;16" else grey.convert("RGB").convert(mode)
        picture.save(folder / f"{mode.replace(';', '-')}.{ending}")
    for size in ((1, 1), (3000, 2), (7, 900)):
        grey.convert("RGB").resize(size).save(folder / f"{size[0]}x{size[1]}.webp")
    tag = Image.Exif()
    tag[0x0112] = 6
    grey.save(folder / "turned.jpg", exif=tag)


@pytest.mark.long
def test_any_mode_size_and_orientation_is_taken(digits: Path, photos: Path, tmp_path: Path) -> None:
    folder = tmp_path / "all kinds"
    all_kinds(folder)
    for run, shape in ((digits, (8, 8, 1)), (photos, (SIDE, SIDE, 3))):
        out = tmp_path / run.name
        done = predict(tmp_path, [f"run={run}/run", "checkpoint=last", f"source={folder}", f"out={out}"])
        assert done.err.count("\n") == 1, done.err  # no library complains
        assert len(table(out)) == len(MODES) + 4
        plain, deep = (fitted(folder / name, shape).float() for name in ("L.png", "I-16.png"))
        assert (plain - deep).abs().max() <= 1
        turned = fitted(folder / "turned.jpg", shape).float()
        grey = Image.linear_gradient("L").resize((90, 40)).transpose(Image.Transpose.ROTATE_270)
        upright = torch.from_numpy(np.array(grey.resize((1, 90))))
        assert (turned[-1].mean() > turned[0].mean()) == bool(upright[-1] > upright[0])


def test_one_file_and_a_folder_that_is_not_written_to_twice(
    photos: Path, tmp_path: Path, refused: Refused
) -> None:
    file = photos / "moved/val/cold/3.jpg"
    done = predict(tmp_path, f"run={photos}/run source={file} top=1 checkpoint=best out=one")
    assert done.out.splitlines()[1] == "one: predictions.csv and 1 sheet of 1 picture"
    assert refused(tmp_path, f"predict run={photos}/run source={file} out=one").startswith(
        "out=one: exists and isn't empty"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("source=nowhere", "source=nowhere: names no picture"),
        ("source=moved top=0", "top=0: must be 1 or more"),
        ("source=moved top=two", "top=two: must be"),
        ("source=moved topp=1", "topp: predict takes no such word. Did you mean top?"),
        ("", "source: predict needs it"),
        ("source=broken", "broken/cut.jpg: can't be read as an image"),
        ("source=deep", "deep/float.tif: has 32 bits a pixel"),
    ],
)
def test_what_predict_is_asked_is_checked(photos: Path, words: str, said: str, refused: Refused) -> None:
    if not (photos / "broken").exists():
        (photos / "broken").mkdir()
        for name in ("a.jpg", "cut.jpg"):
            shutil.copy(photos / "moved/val/cold/1.jpg", photos / "broken" / name)
        truncate(photos / "broken/cut.jpg")
        (photos / "deep").mkdir()
        Image.fromarray(np.zeros((9, 9), dtype=np.float32)).save(photos / "deep/float.tif")
    assert refused(photos, f"predict run=run {words}").startswith(said)
    assert not (photos / "predictions").exists()


def test_a_picture_that_only_decoding_finds_broken_leaves_what_was_answered(
    photos: Path, tmp_path: Path, refused: Refused
) -> None:
    for i in range(40):
        Image.fromarray(np.full((9, 9, 3), i, dtype=np.uint8)).save(tmp_path / f"{i:02}.png")
    content = bytearray((tmp_path / "39.png").read_bytes())
    content[-20] ^= 255  # in the compressed pixels
    (tmp_path / "39.png").write_bytes(content)
    asked = f"predict run={photos}/run source={tmp_path}/*.png out={tmp_path}/out"
    assert refused(tmp_path, asked).startswith(f"{tmp_path}/39.png: can't be read as an image")
    assert [row["file"] for row in table(tmp_path / "out")] == [f"{tmp_path}/{i:02}.png" for i in range(32)]


@pytest.mark.long
def test_a_checkpoint_from_before_predict_takes_the_mean_from_the_data(
    photos: Path, tmp_path: Path, refused: Refused
) -> None:
    shutil.copytree(photos / "run", tmp_path / "run")
    forget(tmp_path / "run")
    words = f"run=run source={photos}/moved/val/cold device=cpu"
    assert "data.root=set: there is no such folder" in refused(tmp_path, f"predict {words}")
    done = predict(tmp_path, f"{words} data.root={photos}/moved out=old")
    new = predict(tmp_path, f"{words.replace('=run ', f'={photos}/run ')} out=new")
    assert done.out.replace("old:", "new:") == new.out


def forget(run: Path) -> None:
    """Make the checkpoints as they were before they knew mean and deviation."""
    for file in run.glob("checkpoints/*/manifest.json"):
        manifest = json.loads(file.read_text())
        for name in ("mean", "std"):
            del manifest["recall"][name]
        del manifest["sha256"]
        file.write_bytes(sealed(manifest))


# -- export -----------------------------------------------------------------------------------------


def logits(model: Path, images: Tensor) -> Tensor:
    if model.suffix == ".pt2":
        return torch.export.load(model).module()(images).detach()
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "checkpoint"),
    [
        ("pt2", "last"),
        ("onnx", "best"),
        pytest.param("onnx", "run/checkpoints/step-12", marks=pytest.mark.long),
    ],
)
def test_an_export_says_what_predict_says(digits: Path, tmp_path: Path, kind: str, checkpoint: str) -> None:
    """For any number of pictures, of a checkpoint of two ranks, in a folder where no data is."""
    target = tmp_path / f"model.{kind}"
    done = ddptrain(
        digits, f"export run=run format={kind} out={target} checkpoint={checkpoint}", **ONE_THREAD
    )
    assert done.code == 0, done.err
    assert "input      images, float32 (any, 1, 8, 8)" in done.err
    facts = json.loads((digits / "run/checkpoints/step-12/manifest.json").read_text())["recall"]
    mean, std = (torch.tensor(facts[name]).view(-1, 1, 1) for name in ("mean", "std"))
    files = sorted((digits / "pictures").glob("000*.png"))
    pixels = torch.stack([fitted(file, (8, 8, 1)) for file in files]).permute(0, 3, 1, 2).float()
    predict(digits, f"run=run source=pictures/000*.png checkpoint={checkpoint} out={tmp_path / 'seen'}")
    rows = table(tmp_path / "seen")
    for some in (slice(0, 1), slice(0, 10), slice(3, 8)):
        shares = logits(target, (pixels[some] - mean) / std).softmax(dim=1)
        assert len(shares) == len(rows[some])
        for row, share in zip(rows[some], shares, strict=True):
            assert share.argmax() == int(row["label_1"])
            assert float(share.max()) == pytest.approx(float(row["probability_1"]), rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(("mode", "rule"), [("RGB", "middle"), ("RGB", "short side"), ("L", "middle")])
def test_an_export_works_by_its_json_alone(
    mode: str, rule: str, photos: Path, digits: Path, tmp_path: Path
) -> None:
    """The program that docs/finetuning.md shows, without torch, gives predict's classes and probabilities, of
    every kind of picture."""
    home = photos if mode == "RGB" else digits
    if rule == "short side":
        home = tmp_path / "other"
        shutil.copytree(photos / "moved", home / "set")
        source = f"data=imagefolder data.root=set data.source.size={SIDE} data.source.resize=28"
        trained(home, f"recipe=cnn_cifar10 {source}")
        (home / "set").rename(home / "moved")
    done = ddptrain(home, f"export run=run format=onnx out={tmp_path}/model.onnx", **ONE_THREAD)
    assert done.code == 0, done.err
    about = json.loads((tmp_path / "model.onnx.json").read_text())
    assert (about["mode"], about["resize"]["rule"]) == (mode, rule)
    assert list(about["outputs"]) == ["logits"]
    properties = {one.key: one.value for one in onnx.load(tmp_path / "model.onnx").metadata_props}
    assert json.loads(properties["ddptrain"]) == about
    page = (Path(__file__).parents[2] / "docs/finetuning.md").read_text()
    script = page.split("```python\n")[1].split("```")[0]
    (tmp_path / "use.py").write_text(script)
    all_kinds(tmp_path / "all kinds")
    some = home / ("moved/val" if mode == "RGB" else "pictures")
    rows = []
    for source in (some, tmp_path / "all kinds"):
        predict(home, ["run=run", f"source={source}", f"out={tmp_path}/seen-{source.name}"])
        rows += table(tmp_path / f"seen-{source.name}")
    files = [row["file"] for row in rows]
    said = subprocess.run(
        [sys.executable, "use.py", *files], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for line, row in zip(said, rows, strict=True):
        of_classes = [float(word) for word in line.split()[-len(about["classes"]) :]]
        shares = torch.tensor(of_classes).double().softmax(dim=0)
        assert f" {row['label_1']} " in line
        assert float(shares.max()) == pytest.approx(float(row["probability_1"]), abs=1e-4)


class Counts(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) if len(images) == 2 else images.flatten(1) * 2


def test_a_model_that_counts_its_samples_is_refused_for_any_number(tmp_path: Path) -> None:
    deployed = Deployed(Counts(), (torch.ones(2, 3, 4, 4),), ("images",), ("logits",), any_batch=True)
    for form in FORMATS.values():
        with pytest.raises(UserError, match=r"Counts computes in a way .* batch=1"):
            form.write(deployed, tmp_path / "model", "fp32", ())
        assert not (tmp_path / "model").exists()


@pytest.mark.long
def test_a_batch_may_be_fixed(digits: Path, tmp_path: Path, refused: Refused) -> None:
    done = ddptrain(digits, f"export run=run format=pt2 out={tmp_path / 'm.pt2'} batch=3", **ONE_THREAD)
    assert done.code == 0, done.err
    assert "input      images, float32 (3, 1, 8, 8)" in done.err
    assert refused(digits, "export run=run format=pt2 batch=0").startswith("batch=0: must be 1")


@pytest.mark.long
def test_a_model_is_not_written_where_its_metadata_goes(
    digits: Path, tmp_path: Path, refused: Refused
) -> None:
    said = refused(digits, f"export run=run format=pt2 out={tmp_path}/model.json")
    assert said.startswith(f"out={tmp_path}/model.json: must end in .pt2 for format=pt2.")
    assert not list(tmp_path.iterdir())
