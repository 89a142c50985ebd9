"""Folders of pictures as people have them: parts by their names, archives, and what can't be meant."""

import logging
import os
from pathlib import Path

import pytest
from PIL import Image

from ddptrain.data.images.folder import FolderSplit, ImageFolder
from ddptrain.data.pictures import pictures_in
from ddptrain.errors import UserError


def fill(root: Path, *layout: str) -> Path:
    """``train/cats 12``: a folder with so many pictures."""
    for line in layout:
        folder, _, count = line.rpartition(" ")
        (root / folder).mkdir(parents=True, exist_ok=True)
        for i in range(int(count)):
            Image.new("RGB", (4, 4)).save(root / folder / f"{i:02}.png")
    return root


def opened(root: Path) -> tuple[list[str], list[str], list[str]]:
    """Classes, and the files to train on and to validate, relative to the root."""
    source = ImageFolder(4)
    source.fetch(root)
    found = source.open(root)
    parts = []
    for split in (found.train, found.valid):
        assert isinstance(split, FolderSplit)
        parts.append([os.path.relpath(file, root) for file in split.files])
        for label, file in zip(split.labels.tolist(), parts[-1], strict=True):
            assert found.classes[label] in Path(file).parts
    return list(found.classes), parts[0], parts[1]


def folders_of(files: list[str]) -> set[str]:
    return {os.path.dirname(file) for file in files}


@pytest.mark.parametrize(
    ("train", "valid"),
    [
        ("train", "val"), ("train", "valid"), ("train", "validation"), ("train", "test"),
        ("Training", "Testing"), ("TRAIN", "Val"), ("training", "Validation"),
    ],
)  # fmt: skip
def test_parts_are_known_by_their_names(tmp_path: Path, train: str, valid: str) -> None:
    fill(tmp_path, f"{train}/a 2", f"{train}/b 3", f"{valid}/a 1", f"{valid}/b 1", "notes 0")
    classes, trained, validated = opened(tmp_path)
    assert classes == ["a", "b"]
    assert folders_of(trained) == {f"{train}/a", f"{train}/b"}
    assert folders_of(validated) == {f"{valid}/a", f"{valid}/b"}
    assert (len(trained), len(validated)) == (5, 2)


def test_val_comes_before_test(tmp_path: Path) -> None:
    fill(tmp_path, *(f"{part}/{name} 2" for part in ("train", "test", "Val", "testing") for name in "ab"))
    assert folders_of(opened(tmp_path)[2]) == {"Val/a", "Val/b"}


@pytest.mark.parametrize("inner", ["dataset", "archive/pictures of mine", "Train set/x"])
@pytest.mark.parametrize("parts", [["train/", "val/"], ["Training/"], [""]])
def test_an_unpacked_archive_may_lie_in_folders_of_its_own(
    tmp_path: Path, inner: str, parts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, *(f"{inner}/{part}{name} 10" for part in parts for name in ("cats", "dogs")))
    fill(tmp_path, "__MACOSX/dataset 3", ".git/objects 0")
    (tmp_path / "readme.txt").write_text("")
    with caplog.at_level(logging.INFO):
        classes, trained, validated = opened(tmp_path)
    assert classes == ["cats", "dogs"]
    assert all(file.startswith(inner + "/") for file in trained + validated)
    assert len(trained) == (20 if len(parts) == 2 else 18)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.endswith(f"{tmp_path / inner} is read, the only folder in data.root={tmp_path}")


def test_nothing_is_said_where_the_root_is_what_it_should_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        opened(fill(tmp_path, "train/cats 10", "train/dogs 10"))
    assert not caplog.records


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    classes, trained, validated = opened(fill(tmp_path, "bus 10", "train 10", "tram/old 10"))
    assert classes == ["bus", "train", "tram"]
    assert folders_of(trained + validated) == {"bus", "train", "tram/old"}


@pytest.mark.parametrize("name", ["val", "test", "Validation"])
def test_val_beside_classes_is_no_class(tmp_path: Path, name: str) -> None:
    fill(tmp_path, "cats 10", "dogs 10", f"{name}/cats 3", f"{name}/dogs 3")
    with pytest.raises(UserError, match=rf"holds classes \(cats, \.\.\.\) and {name} with folders of their"):
        opened(tmp_path)


def test_what_a_folder_beside_the_classes_is_taken_for_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Pictures without a class, say, as competitions have them."""
    with caplog.at_level(logging.INFO):
        assert opened(fill(tmp_path / "a", "cats 10", "dogs 10", "test 10"))[0] == ["cats", "dogs", "test"]
    assert "test is read as a class, for there is no train beside it" in caplog.text
    with caplog.at_level(logging.INFO):
        opened(fill(tmp_path / "b", "train/x 2", "train/y 2", "val/x 1", "test/x 1", "more/x 1"))
    assert "b: reads train and val, and not more, test beside it" in caplog.text


def test_files_are_in_the_order_of_their_paths(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ("a/1.png", "a-b/1.png", "a.png", "B.PNG", "b/c.png", "b.d/e.png", ".h/i.png", "notes.txt")
    for name in names:
        (tmp_path / "class" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "class" / name).touch()
    (tmp_path / "class" / "loop").symlink_to(tmp_path / "class")
    (tmp_path / "loose.png").touch()
    with caplog.at_level(logging.INFO):
        _, trained, _ = opened(fill(tmp_path, "other 12"))
    expected = sorted(Path("class", name) for name in names if name not in ("notes.txt", ".h/i.png"))
    assert [Path(file) for file in trained[: len(expected)]] == expected
    assert trained[len(expected) :] == [f"other/{i:02}.png" for i in range(12) if i != 9]
    told = [record.getMessage() for record in caplog.records]
    assert f"note       {tmp_path}: 2 files not read (not .jpg, " in told[0]  # but not the hidden one
    assert told[0].endswith(": class/loop, class/notes.txt")
    assert told[1] == f"note       {tmp_path}: 1 pictures are in no class folder, and not read: loose.png"


def test_classes_of_which_none_is_held_out_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened(fill(tmp_path, "a 9", "b 10", "c 3"))
    (line,) = (record.getMessage() for record in caplog.records)
    assert f"data.root={tmp_path}: no picture for validation in 2 of 3 classes, a among them" in line


MISTAKES = {
    "a file": (["a 1"], "a/00.png", r"data\.root=\S+/00\.png: is a file\. Unpack it and name the folder"),
    "nothing there": (["a 1"], "b", r"data\.root=\S+/b: there is no such folder"),
    "pictures in the root": ([". 3"], ".", r"holds pictures itself \(00\.png, \.\.\.\)\. Put them"),
    "no classes in train": (["train 3", "val/a 2"], ".", r"/train: holds pictures itself"),
    "only train, no classes": (["train 3"], ".", r"/train: holds pictures itself"),
    "unlabelled test": (["train/a 3", "train/b 3", "test 4"], ".",
                        r"/test: holds pictures itself .* elsewhere if their classes are not known"),
    "empty train": (["train 0"], ".", r"data\.root=\S+/train: no image found in its class folders"),
    "empty": ([". 0"], ".", r"no image found in its class folders"),
    "empty class": (["a 10", "b 0"], ".", r"/b: this class folder holds no image"),
    "two trains": (["train/a 2", "Train/a 2", "val/a 1"], ".", r"holds Train and train\. Rename or remove"),
    "no train": (["val/a 2", "val/b 2", "test/a 2"], ".", r"holds val, and no train\. Put train/<class>"),
    "several sets": (["old/a 9", "set/Train/a 9", "set/val/a 9"], ".",
                     r"its folder set holds Train and val, and is not the only one\..*data\.root=\S+/set$"),
    "loose pictures beside classes": (["set 2", "set/a 10", "set/b 10"], ".",
                                      r"/set: the only folder .* holds pictures \(00\.png.* beside folders"),
    "one class": (["set/cats 20"], ".", r"holds one class, 'cats'"),
    "capitals": (["train/Cats 2", "train/b 2", "val/cats 2", "val/b 1"], ".",
                 r"/val: class 'cats' is not in the training folder\. 'Cats' is, which differs in capitals"),
    "spaces": (["train/red fox 2", "train/b 2", "val/red  fox 2"], ".",
               r"/val: class 'red  fox' .* 'red fox' is"),
    "another class": (["train/a 2", "train/b 2", "val/c 2"], ".",
                      r"/val: class 'c' .* Both need the same classes"),
    "too few": (["a 9", "b 3"], ".", r"no image is left for validation\. Give each class ten files or more"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_get_one_message_that_names_the_folder(tmp_path: Path, mistake: str) -> None:
    layout, root, message = MISTAKES[mistake]
    fill(tmp_path, *layout)
    with pytest.raises(UserError, match=message) as raised:
        opened(tmp_path / root)
    assert "\n" not in str(raised.value)


def test_links_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A linked folder is not followed, which the log says; a link that leads nowhere is a missing picture."""
    for folder in ("set/a", "elsewhere", ".hidden"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "1.png").touch()
    (tmp_path / "set/b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "set/.c").symlink_to(tmp_path / ".hidden")
    (tmp_path / "set/a/2.png").symlink_to(tmp_path / "annexed")
    caplog.set_level("INFO")
    assert pictures_in(tmp_path / "set") == [tmp_path / "set/a/1.png", tmp_path / "set/a/2.png"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"note       {tmp_path / 'set'}: 1 linked folder not followed: b"


@pytest.mark.skipif(os.getuid() == 0, reason="root reads every folder")
def test_a_folder_below_that_is_nobodys_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A disk's lost+found. The folder itself has to be readable."""
    fill(tmp_path, "a 1", "lost+found 1")
    (tmp_path / "lost+found").chmod(0)
    assert pictures_in(tmp_path) == [tmp_path / "a/00.png"]
    assert "lost+found: can't be read (Permission denied)" in caplog.text
    with pytest.raises(UserError, match="can't be read"):
        pictures_in(tmp_path / "lost+found")
