"""A verb of a package of one's own, as docs/verbs.md shows it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from shell import ddptrain

PAGE = Path(__file__).parents[2] / "docs/verbs.md"


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """The folder of a package with the page's verb."""
    module, project, on_a_model = re.findall(r"```(?:python|toml)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    source = tmp_path / "source"
    source.mkdir()
    (source / "sizes.py").write_text(module)
    (source / "parameters.py").write_text(on_a_model)
    project = project.replace('"sizes:VERB"', '"sizes:VERB"\nparameters = "parameters:VERB"')
    (source / "pyproject.toml").write_text(project.replace('["sizes"]', '["sizes", "parameters"]'))
    target = tmp_path / "installed"
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([sys.executable, *pip, "--target", str(target), str(source)], check=True)
    return str(target)


def test_a_verb_of_a_package(installed: str, tmp_path: Path) -> None:
    step = tmp_path / "run/checkpoints/step-10"
    step.mkdir(parents=True)
    (step / "state.pt").write_bytes(bytes(3 * 2**20))
    told = ddptrain(tmp_path, "sizes run=run", PYTHONPATH=installed)
    assert (told.code, told.out) == (0, "step-10  3.0\n")
    assert ddptrain(tmp_path, "sizes run=run foo=3", PYTHONPATH=installed).code == 2
    wrong = ddptrain(tmp_path, "sizes run=nowhere", PYTHONPATH=installed)
    assert (wrong.code, wrong.out) == (2, "")
    assert wrong.err.startswith("ddptrain: run=nowhere: must name a run's folder")
    assert "The size of each checkpoint" in ddptrain(tmp_path, "sizes --help", PYTHONPATH=installed).out
    assert re.search(r"^  sizes +the size of", ddptrain(tmp_path, "--help", PYTHONPATH=installed).out, re.M)


@pytest.mark.long
def test_a_verb_on_a_runs_model(installed: str, tmp_path: Path) -> None:
    words = "recipe=cnn_digits device=cpu train.steps=1 model.width=8 observers=[] run.dir=run"
    trained = ddptrain(tmp_path, words)
    assert trained.code == 0, trained.err
    counted = re.search(r"([\d,]+) parameters", trained.err)
    told = ddptrain(tmp_path, "parameters run=run", PYTHONPATH=installed)
    assert counted is not None
    assert told.out == counted[1].replace(",", "") + "\n", told.err


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (
            "import nowhere_at_all",
            "sizes:VERB can't be imported (ModuleNotFoundError: No module named 'nowhere_at_all')",
        ),
        pytest.param(
            "from ddptrain.verbs.verb import Verb\nVERB = Verb(of_another_version=True)",
            "sizes:VERB can't be imported (TypeError: ",
            marks=pytest.mark.long,
        ),
        pytest.param("VERB = (", "sizes:VERB can't be imported (SyntaxError: ", marks=pytest.mark.long),
        ("VERB = 1", "the entry point sizes:VERB must name a ddptrain.verbs.verb.Verb."),
    ],
)
def test_a_broken_package_is_named_and_the_others_go_on(
    installed: str, tmp_path: Path, module: str, said: str
) -> None:
    (Path(installed) / "sizes.py").write_text(f"{module}\n")
    listed = ddptrain(tmp_path, "--help", PYTHONPATH=installed)
    assert listed.code == 0, listed.err
    assert re.search(rf"^  sizes +{re.escape(said)}", listed.out, re.M), listed.out
    assert re.search(r"^  evaluate ", listed.out, re.M)
    used = ddptrain(tmp_path, "sizes run=run", PYTHONPATH=installed)
    assert used.code == 2
    assert used.err.startswith(f"ddptrain: sizes: {said}")


def test_it_is_completed(installed: str) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "ddptrain", "completion", "words", "ddptrain siz"],
        env={**os.environ, "PYTHONPATH": installed}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout == "sizes \n"


def test_an_unknown_verb_is_refused_with_the_nearest(tmp_path: Path) -> None:
    wrong = ddptrain(tmp_path, "evalute run=x")
    assert wrong.code == 2
    assert "evalute: there is no such verb; there are train, launch, evaluate" in wrong.err
    assert wrong.err.rstrip().endswith("Did you mean evaluate?")
