"""The command ``ddptrain``, and what it says without a verb."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from shell import ddptrain, with_imports

from ddptrain.config.arguments import GROUPS
from ddptrain.config.choices import first_comment
from ddptrain.verbs.argv import parse
from ddptrain.verbs.help import OPTIONS
from ddptrain.verbs.installed import verb_named, verb_names

ROOT = Path(__file__).parents[2]
PROGRAM = Path(sys.executable).with_name("ddptrain")


def answer(cwd: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, *words],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.long
def test_it_answers_as_python_does(tmp_path: Path) -> None:
    for words in (["--version"], ["recipe=cnn_digits", "train.epocs=2"], []):
        asked, other = ddptrain(tmp_path, words), answer(tmp_path, *words)
        assert (asked.code, asked.out, asked.err) == (other.returncode, other.stdout, other.stderr)


@pytest.mark.parametrize(
    "launch", [[], pytest.param(["launch", "--nproc-per-node=2"], marks=pytest.mark.long)]
)
def test_it_finds_the_modules_of_the_current_folder(launch: list[str], tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/packaging/my_recipe/my_recipe.py", tmp_path)
    shutil.copytree(ROOT / "tests/packaging/my_recipe/recipe", tmp_path / "yamls/recipe")
    words = ["hydra.searchpath=[yamls]", "recipe=my_recipe", "device=cpu", "train.steps=1", "run.dir=run"]
    done = answer(tmp_path, *launch, *words, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/summary.json").is_file()
    safe = answer(tmp_path, *words, PYTHONSAFEPATH="1")
    assert safe.returncode == 2
    assert "my_recipe" in safe.stderr


def test_help_names_all_verbs_options_recipes_and_choices(tmp_path: Path) -> None:
    (tmp_path / "mine/recipe").mkdir(parents=True)
    (tmp_path / "mine/recipe/birds.yaml").write_text("# @package _global_\n# Which bird it is.\n# More.\n")
    ended, imported = with_imports(tmp_path, "--help --config-dir=mine")
    assert (ended.code, ended.err) == (0, "")
    assert not {"torch", "hydra", "omegaconf"} & imported
    rows = dict(re.findall(r"^  (\S+?)[=,]?(?: +(.*))?$", ended.out, re.M))
    assert not [verb for verb in verb_names() if not rows[verb]]
    assert rows["birds"] == "Which bird it is."
    for path in (ROOT / "conf/recipe").glob("*.yaml"):
        assert rows[path.stem] == first_comment(path)
        assert rows[path.stem].endswith(".")  # a whole sentence
    for group in set(GROUPS) - {"recipe", "controllers"}:
        assert rows[group].split(", ") == sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))
    assert "optim" in ddptrain(tmp_path, "recipe=cnn_digits --help").out


def test_every_option_in_the_help_is_one() -> None:
    for said in OPTIONS:  # --cfg, -c job|hydra|all
        for name in re.findall(r"-[\w-]+", said.partition("<")[0]):
            assert parse([name, *(["value"] if re.search(" [<a-z]", said) else [])]).options


def test_every_verb_but_training_has_a_help_of_its_own(tmp_path: Path) -> None:
    assert [verb for verb in verb_names() if not verb_named(verb).help] == ["train"]
    assert ddptrain(tmp_path, "train --help").out == ddptrain(tmp_path, "--help").out
