"""What a CSV file says of pictures is what is trained, or it is refused or told: never another class."""

import unicodedata
from pathlib import Path

import pytest
from PIL import Image

from ddptrain.data.images.csv_labels import CsvLabels
from ddptrain.data.images.folder import ImageFolder
from ddptrain.data.images.source import ImageSet
from ddptrain.errors import UserError


def opened(root: Path, heading: str, *rows: str, encoding: str = "utf-8") -> ImageSet:
    """rows: what follows the file's name."""
    for i in range(len(rows)):
        Image.new("RGB", (8, 8)).save(root / f"{i}.png")
    lines = [heading, *(f"{i}.png,{row}" for i, row in enumerate(rows))]
    (root / "labels.csv").write_text("\n".join(lines) + "\n", encoding=encoding)
    return CsvLabels(size=8).open(root)


TWO = ("cat,train", "dog,train", "cat,val", "dog,val")
NFC, NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_byte_order_mark_quotes_and_spaces_change_nothing(tmp_path: Path, encoding: str) -> None:
    rows = ('"cat",train', " dog , train", 'cat ,"val"', "dog,VAL")
    found = opened(tmp_path, "file,label,split", *rows, encoding=encoding)
    assert list(found.classes) == ["cat", "dog"]
    assert [part.labels.tolist() for part in (found.train, found.valid)] == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("heading", "rows", "said"),
    [
        ("file,label,split", ("cat;dog,train", *TWO), r"'cat;dog' would be one class\. Write several"),
        ("file,label,split", ('"cat,dog",train', *TWO), "'cat,dog' would be one class"),
        ("file,labels,split", ("cat|dog,train", *TWO), r"'cat\|dog' would be one class"),
        ("file,cat,dog,cat,split", ("1,0,0,train",), "two columns are called 'cat'"),
        ("file,label,label,split", ("cat,dog,train",), "two columns are called 'label'"),
        ("file,label,Split", TWO, r"a column is called 'Split'\. Call it split"),
        ("file, label", ("cat", "dog"), r"a column is called ' label'\. Call it label"),
        ("file,label,fold", ("0,1", "1,0"), "has a column label, and fold beside it"),
        ("file,labels,label", ("a,b",), "has a column labels, and label beside it"),
        ("file,label,split", (f"{NFC},train", f"{NFD},train", *TWO),
         r"two classes are called 'caf.*' which differ in how Unicode writes|two classes .* in how Unicode"),
        ("file,label,split", (f"{NFC},train", f"{NFD},val", *TWO), "in how Unicode writes them alone"),
    ],
)  # fmt: skip
def test_what_can_be_meant_in_two_ways(
    tmp_path: Path, heading: str, rows: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        opened(tmp_path, heading, *rows)


@pytest.mark.parametrize(
    "again", ["0.png,dog,train", "./0.png,cat,train", "0.png,cat,val", "a/../0.png,cat,val"]
)
def test_a_picture_has_one_line(tmp_path: Path, again: str) -> None:
    """Several lines would be several samples, of other classes, or in both parts."""
    (tmp_path / "a").mkdir()
    opened(tmp_path, "file,label,split", *TWO)
    with (tmp_path / "labels.csv").open("a") as file:
        file.write(f"{again}\n")
    with pytest.raises(UserError, match=r"labels.csv, line 6: file=.*0\.png: is in line 2 too"):
        CsvLabels(size=8).open(tmp_path)


def test_a_column_without_a_picture_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="ddptrain"):
        found = opened(
            tmp_path, "file,owl,dog,cat,split", "0,1,0,train", "0,0,1,train", "0,1,1,val", "1,0,0,test"
        )
    assert list(found.classes) == ["cat", "dog"]
    assert found.valid.labels.tolist() == [[1, 1]]
    assert "no picture has owl, so it is no class" in caplog.text


@pytest.mark.parametrize(
    ("heading", "rows", "why"),
    [
        ("file,label", ["cat", "dog"] * 5, "every tenth line is held out"),
        ("file,label,split", ["cat,train", "dog,train", "dog,val"], "see `split`"),
        ("file,labels,split", ["cat;dog,train", "dog,val"], "see `split`"),
    ],
)
def test_a_class_without_a_validation_picture_is_told(
    heading: str, rows: list[str], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="ddptrain"):
        opened(tmp_path, heading, *rows)
    said = f"no picture for validation in 1 of 2 classes, cat among them: {why}"
    assert f"{tmp_path / 'labels.csv'}: {said}" in caplog.text


def test_class_folders_that_unicode_writes_in_two_ways(tmp_path: Path) -> None:
    """As macOS and Linux do it."""
    for part, name in (("train", NFC), ("train", "dog"), ("val", NFD), ("val", "dog")):
        (tmp_path / part / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / part / name / "0.png")
    with pytest.raises(UserError, match="which differs in how Unicode writes it") as refused:
        ImageFolder(8).open(tmp_path)
    assert ascii(NFD) in str(refused.value)
    (tmp_path / "val" / NFD).rename(tmp_path / "train" / NFD)
    with pytest.raises(UserError, match="two classes are called"):
        ImageFolder(8).open(tmp_path)
