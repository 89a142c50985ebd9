"""Mistakes that people make with folders, files, weights and labels: exit code 2, and one message that names
the file or the key."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision import models

from ddptrain.verbs.main import main

FINETUNE = (
    "recipe=finetune device=cpu data.workers=0 data.source.size=16 model.name=resnet18 train.steps=1"
    " train.batch_size=4 observers=[] run.dir=run"
)
FOLDER = f"{FINETUNE} init.weights=null data.root="
WEIGHTS = f"{FINETUNE} data.root=good init.weights="
GOOD = f"{WEIGHTS}null"
CSV = f"{FINETUNE} init.weights=null data=csv data.root=good data.source.file="
SET = f"{FINETUNE} init.weights=null data=image_dataset data.source.dataset._target_="
MASKS = (
    "recipe=segmentation device=cpu data.workers=0 data.size=32 train.steps=1 init.weights=null run.dir=run"
    " data.root="
)

MISTAKES = {
    # folders
    f"{FOLDER}nowhere": "data.root=nowhere: there is no such folder",
    f"{FOLDER}good/cat/0.png": "data.root=good/cat/0.png: is a file",
    f"{FOLDER}good/cat": "good/cat: holds pictures itself",
    f"{FOLDER}one": "data.root=one: holds one class, 'cat'",
    f"{FOLDER}hollow": "hollow/dog: this class folder holds no image",
    f"{FOLDER}few": "data.root=few: no image is left for validation",
    f"{FOLDER}other": "other/val: class 'bird' is not in the training folder",
    f"{FOLDER}cases": "cases/val: class 'Dog' is not in the training folder. 'dog' is, which",
    f"{FOLDER}twice": "twice: holds Train and train",
    f"{FOLDER}untrained": "untrained: holds val, and no train",
    f"{FOLDER}texts": "texts: no image found in its class folders",
    # files
    f"{FOLDER}torn": "torn/cat/0.png: can't be read as an image",
    f"{FOLDER}fake": "fake/cat/0.png: can't be read as an image",
    f"{FOLDER}deep": "deep/cat/0.png: has 32 bits a pixel",
    f"{FOLDER}good augment=none data.source.cache=good/a": "data.source.cache=good/a: lies in data.root",
    f"{FOLDER}good data.source.resize=8": "data.source.resize=8: must be data.source.size=16 or more",
    f"{FOLDER}good data.source.size=0": "data.source.size=0: must be 1 pixel or more",
    # weights
    f"{WEIGHTS}nowhere.pt": "nowhere.pt: ",
    f"{WEIGHTS}good": "good: ",
    f"{WEIGHTS}torn.pt": "torn.pt: ",
    f"{WEIGHTS}text.safetensors": "text.safetensors: ",
    f"{WEIGHTS}empty.pt": "empty.pt: ",
    f"{WEIGHTS}vgg.pt": "vgg.pt: ",
    f"{WEIGHTS}torchvision:IMAGENET1K_V9": "IMAGENET1K_V9",
    f"{WEIGHTS}timm:default": "init.weights=timm:default",
    f"{GOOD} data.size=64": "data.size: there is no such key. Did you mean data.source.size?",
    f"{GOOD} freeze=[layer9.*]": "freeze=layer9.*: matches the name of no parameter",
    f"{GOOD} freeze=[*]": "freeze: matches every parameter",
    f"{GOOD} freeze=layer1": "freeze=layer1: must be a list",
    f"{GOOD} optim.groups=[{{params:fc.*,rate:1}}]": "optim.groups[0].rate=1: there is no such setting",
    f"{GOOD} optim.layer_decay=2": "optim.layer_decay=2: must be a number above 0 and at most 1",
    f"{GOOD} model.name=resnet19": "model.name=resnet19: there is no such model. Did you mean resnet1",
    f"{GOOD} model.name=vgg11 +model.drop=1": "model.name=vgg11: can't be built so",
    # labels
    f"{CSV}none.csv": "data.root=good: holds no file none.csv",
    f"{CSV}heads.csv": "good/heads.csv: its first line must name the columns",
    f"{CSV}gone.csv": "good/gone.csv, line 3: file=cat/99.png: there is no such file in good",
    f"{CSV}short.csv": "good/short.csv, line 2: has not as many values as there are columns (2)",
    f"{CSV}several.csv": "data: the labels must be int64 (n,), one class a picture",
    f"{CSV}split.csv": "good/split.csv, line 2: split=dev: must be one of train",
    f"{GOOD} task.class_weights=[1,2,3]": "task.class_weights: has 3 numbers; the data have 2 classes",
    f"{GOOD} task.class_weights=[1,0]": "task.class_weights=[1, 0]: must be positive numbers",
    f"{GOOD} data.balance=2": "data.balance=2: must be from 0 (off) to 1",
    f"{GOOD} +task.best_metric=f1": "task.best_metric=f1: must be one of accuracy",
    f"{SET}torchvision.datasets.Flowers103": "has no Flowers103. Did you mean Flowers102?",
    f"{SET}torchvision.datasets.LSUN": "torchvision.datasets.LSUN: not allowed",
    f"{SET}torchvision.datasets.FakeData data.source.classes=1": "data.source.classes=1: must be 2 or more",
    # masks
    f"{MASKS}good": "data.root: there is no folder good/images",
    f"{MASKS}unmasked data.classes=2": "unmasked/images: 1 of 12 pictures have no mask: 3.png",
    f"{MASKS}wide data.classes=2": "wide/masks/1.png",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("mistakes")
    picture = Image.new("RGB", (24, 20), (200, 30, 30))

    def pictures(place: str, count: int = 10) -> None:
        (home / place).mkdir(parents=True)
        for i in range(count):
            picture.save(home / place / f"{i}.png")

    for place in ("good", "torn", "fake", "deep"):
        pictures(f"{place}/cat")
        pictures(f"{place}/dog")
    pictures("one/cat")
    pictures("hollow/cat")
    (home / "hollow/dog").mkdir()
    pictures("few/cat", 5)
    pictures("few/dog", 5)
    for place in (
        "other/train/cat",
        "other/train/dog",
        "other/val/bird",
        "cases/train/cat",
        "cases/train/dog",
    ):
        pictures(place, 2)
    for place in ("cases/val/cat", "cases/val/Dog", "untrained/val/cat", "untrained/val/dog"):
        pictures(place, 2)
    for place in ("twice/Train/cat", "twice/train/cat", "twice/val/cat"):
        pictures(place, 2)
    (home / "texts/cat").mkdir(parents=True)
    (home / "texts/cat/a.txt").write_text("no picture")
    torn = home / "torn/cat/0.png"
    torn.write_bytes(torn.read_bytes()[:60])
    (home / "fake/cat/0.png").write_text("<html>404</html>")
    Image.new("F", (20, 20)).save(home / "deep/cat/0.png", "TIFF")
    (home / "torn.pt").write_bytes(b"PK\x03\x04 torn")
    (home / "text.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    torch.save({}, home / "empty.pt")
    torch.save(models.squeezenet1_1().state_dict(), home / "vgg.pt")
    lines = {
        "heads": "name,class\n", "gone": "file,label\ncat/0.png,cat\ncat/99.png,cat\n",
        "short": "file,label\ncat/0.png\n", "split": "file,label,split\ncat/0.png,cat,dev\n",
        "several": "file,labels\n" + "".join(f"cat/{i}.png,cat;pet\n" for i in range(10)),
    }  # fmt: skip
    for name, text in lines.items():
        (home / "good" / f"{name}.csv").write_text(text)
    for place in ("unmasked", "wide"):
        pictures(f"{place}/images", 12)
        (home / place / "masks").mkdir()
        for i in range(12):
            Image.new("L", (24, 20), i % 2).save(home / place / f"masks/{i}.png")
    (home / "unmasked/masks/3.png").unlink()
    Image.new("L", (30, 20)).save(home / "wide/masks/1.png")
    return home


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_named_once(
    folder: Path, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["ddptrain"])
    shutil.rmtree(folder / "run", ignore_errors=True)
    code = main(line.split())
    printed = capsys.readouterr().err
    assert code == 2, printed
    (message,) = re.split(r"^ddptrain: ", printed, flags=re.MULTILINE)[1:]
    assert MISTAKES[line] in message
    assert len(message.strip().splitlines()) == 1
    assert "Traceback" not in printed
