"""Overrides of a run's saved config, and of what a script gives; and whose Hydra it is."""

import json
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

from ddptrain.config.compose import composed_tree, saved_tree
from ddptrain.distributed.launcher.process import OBJECTS
from ddptrain.errors import UserError
from ddptrain.verbs.argv import parse
from ddptrain.verbs.composing import own_options
from ddptrain.verbs.script import WORDS, with_script

SAVED = {"recipe": "cnn_digits", "seed": 0, "data": {"root": "data", "augment": {"crop": 2, "cutout": 0}}}


@pytest.mark.parametrize(
    ("words", "data"),
    [
        ("~data.root", {"augment": {"crop": 2, "cutout": 0}}),
        ("~data.augment.crop", {"root": "data", "augment": {"cutout": 0}}),
        ("~data.augment", {"root": "data"}),
        ("++data.balance=true", {**SAVED["data"], "balance": True}),  # type: ignore[dict-item]
        ("+data.balance=true", {**SAVED["data"], "balance": True}),  # type: ignore[dict-item]
        ("data.augment.crop=3 ++data.root=x", {"root": "x", "augment": {"crop": 3, "cutout": 0}}),
    ],
)
def test_keys_are_taken_out_and_added_as_in_a_training(tmp_path: Path, words: str, data: Any) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(SAVED))
    arguments = parse(["evaluate", *words.split()])
    assert saved_tree(tmp_path / "config.yaml", arguments, arguments.overrides)["data"] == data


@pytest.mark.parametrize("word", ["~data.rot", "data.rot=1"])
def test_what_is_not_there_is_named(tmp_path: Path, word: str) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(SAVED))
    with pytest.raises(UserError, match=r"^data\.rot: .*Did you mean data\.root"):
        saved_tree(tmp_path / "config.yaml", parse(["evaluate"]), [word])


def test_a_users_word_comes_after_the_words_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "objects.pkl").touch()
    (tmp_path / WORDS).write_text(json.dumps(["recipe=fit", "train.epochs=2"]))
    monkeypatch.setenv(OBJECTS, str(tmp_path / "objects.pkl"))
    for words in (["train={epochs:7}"], ["find", "lr", "train={epochs:7}"]):
        known = with_script(parse([*words, "--script=mine.py"]), composes=True)
        assert known.overrides == (*words[1:-1], "recipe=fit", "train.epochs=2", "train={epochs:7}")


def test_a_programs_own_hydra_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("own: 1\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        known = composed_tree(parse(["recipe=cnn_digits"]))
        assert known is not None
        assert known[0]["recipe"] == "cnn_digits"
        assert hydra.compose("config") == {"own": 1}
    assert not GlobalHydra.instance().is_initialized()


def test_a_further_place_of_yamls_is_part_of_the_command(tmp_path: Path) -> None:
    arguments = parse(["recipe=mine", f"hydra.searchpath=[{tmp_path}]", "--env=HOME", "seed=1"])
    assert own_options(arguments) == ["--env=HOME", f"hydra.searchpath=[{tmp_path}]"]


def test_help_needs_no_options_that_are_right() -> None:
    assert parse(["launch", "--nproc-per-node=2", "--help"]).asks_help
