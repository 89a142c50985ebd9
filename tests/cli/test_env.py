"""``--env``: what the command line lets a YAML read of the environment."""

from pathlib import Path

import pytest
import yaml
from shell import ddptrain, early_refusal

RECIPE = """# @package _global_
defaults:
  - cnn_digits
  - _self_
log:
  every: ${oc.env:EVERY}
data:
  root: ${oc.env:PLACE,elsewhere}
"""
WORDS = "--config-dir=mine --env EVERY --env=PLACE recipe=mine device=cpu train.steps=1"


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path) -> None:
    (tmp_path / "mine/recipe").mkdir(parents=True)
    (tmp_path / "mine/recipe/mine.yaml").write_text(RECIPE)


@pytest.mark.parametrize("words", [pytest.param("", marks=pytest.mark.long), "launch --nproc-per-node=2 "])
def test_a_variable_that_the_command_line_names_is_read_by_every_rank(words: str, tmp_path: Path) -> None:
    done = ddptrain(tmp_path, f"{words}{WORDS} run.dir=run", EVERY="7", PLACE="there", OMP_NUM_THREADS="1")
    assert done.code == 0, done.err
    saved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert (saved["log"]["every"], saved["data"]["root"]) == (7, "there")
    command = (tmp_path / "run/command.txt").read_text()
    assert "--env=EVERY --env=PLACE recipe=mine" in command  # which repeats the run


@pytest.mark.long
def test_so_do_the_jobs_of_a_sweep(tmp_path: Path) -> None:
    done = ddptrain(tmp_path, f"{WORDS} --multirun seed=1,2", EVERY="7", OMP_NUM_THREADS="1")
    assert done.code == 0, done.err
    for job in ("000", "001"):
        saved = yaml.safe_load((tmp_path / f"sweeps/mine/{job}/config.yaml").read_text())
        assert (saved["log"]["every"], saved["data"]["root"]) == (7, "elsewhere")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "${oc.env:PLACE}: a config may not read this variable"),
        ("", "if it is no secret, name it on the command line: --env PLACE"),
        (
            "--env PLACE",
            "TORCHELASTIC_RUN_ID, PLACE; if it is no secret, name it on the command",
        ),
        ("--env EVERY=7", "--env EVERY=7: takes the name of an environment variable: --env DATA"),
        ("--env", "--env: needs a value"),
    ],
)
def test_no_other_is_read(words: str, said: str, tmp_path: Path) -> None:
    line = f"--config-dir=mine recipe=mine device=cpu {words}"
    assert said in early_refusal(tmp_path, line, EVERY="7", PLACE="there")


def test_one_that_is_not_set_is_named(tmp_path: Path) -> None:
    assert "log.every: ${oc.env:EVERY}: is not set" in early_refusal(tmp_path, WORDS)
