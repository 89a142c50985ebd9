"""The wheel holds what git tracks, and recipes train from where users keep them: no checkout in sight."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
MY_RECIPE = Path(__file__).parent / "my_recipe"
QUICK = ["device=cpu", "train.steps=3", "observers=[console,jsonl,plots]"]
NOT_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PYTHONPATH", "PYTHONHOME")


def done(cwd: Path, command: Sequence[str | Path], **variables: str) -> str:
    """Standard output of a command that must succeed."""
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
    ended = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**inherited, **variables},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def tracked() -> list[Path]:
    if not (CHECKOUT / ".git").exists():
        pytest.skip("compares with what git tracks")
    listed = done(CHECKOUT, ["git", "ls-files", "-z"])
    return [Path(name) for name in listed.split("\0") if name]


def checked_out(folder: Path) -> Path:
    """A new folder's ``ddptrain``, with the tracked files."""
    for name in tracked():
        (folder / "ddptrain" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / name, folder / "ddptrain" / name, follow_symlinks=False)
    return folder / "ddptrain"


def metrics(home: Path) -> dict[str, float]:
    """The final metrics of the one run below a folder."""
    (summary,) = home.glob("runs/*/*/summary.json")
    found: dict[str, float] = json.loads(summary.read_text())["metrics"]
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a release is built, from the sdist, beside which it lies. Of a copy of the tracked files: old build
    folders can't add to it."""
    source, built = checked_out(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("wheel")
    done(source, [sys.executable, "-m", "build", "--no-isolation", "--outdir", built])
    (path,) = built.glob("ddptrain-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the installed wheel, for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("installed")
    install(wheel, folder)
    return folder


def install(package: Path, folder: Path) -> None:
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    done(folder, [sys.executable, "-m", "pip", "install", *options, "--target", folder, package])


def test_the_wheel_holds_the_tracked_files_and_nothing_else(wheel: Path) -> None:
    homes = {
        "ddptrain": "ddptrain",
        "conf": "ddptrain/conf",
        "recipes": "ddptrain/recipes",
        "hydra_plugins": "hydra_plugins",
    }
    expected = {
        f"{homes[name.parts[0]]}/{name.relative_to(name.parts[0]).as_posix()}"
        for name in tracked()
        if name.parts[0] in homes and not (CHECKOUT / name).is_symlink()
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {"ddptrain/py.typed", "ddptrain/conf/config.yaml", "ddptrain/recipes/cnn.py"} <= expected


def test_wheel_and_sdist_are_fit_for_a_registry(wheel: Path) -> None:
    files = sorted(wheel.parent.iterdir())
    assert [file.suffix for file in files] == [".whl", ".gz"]
    done(wheel.parent, [sys.executable, "-m", "twine", "check", "--strict", *files])


@pytest.mark.long
def test_a_script_is_fitted_by_the_installed_wheel_from_an_empty_folder(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("""
import ddptrain, torch
x = torch.randn(200, 4)
net = torch.nn.Linear(4, 1)
run = ddptrain.fit(net, (x, x.sum(1, keepdim=True)), "device=cpu", loss=torch.nn.MSELoss(), epochs=2, ranks=2)
print(ddptrain.__file__, run.outcome, run.model(x[:2]).shape, sep="\\n")
""")
    lines = done(tmp_path, [sys.executable, "mine.py"], PYTHONPATH=str(installed)).splitlines()
    assert lines[-3:] == [str(installed / "ddptrain/__init__.py"), "done", "torch.Size([2, 1])"]


def test_the_installed_wheel_trains_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    script = """
import sys
from ddptrain.verbs.main import main
assert main(sys.argv[1:]) == 0
for name, module in sys.modules.items():
    if name.split(".")[0] == "ddptrain":
        print(module.__file__)
"""
    train = [sys.executable, "-c", script, "recipe=cnn_digits", *QUICK]
    files = done(tmp_path, train, PYTHONPATH=str(installed)).splitlines()
    assert 0 < metrics(tmp_path)["accuracy"] < 1
    assert all(Path(file).is_relative_to(installed) for file in files), files
    assert str(installed / "ddptrain" / "recipes" / "cnn.py") in files


@pytest.mark.long
def test_the_installed_wheel_sweeps_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    """Hydra's scanner finds the launcher in the namespace package, beside other packages' plugins."""
    sweep = [sys.executable, "-m", "ddptrain", "--multirun", "recipe=cnn_digits", "seed=1,2", *QUICK]
    table = done(tmp_path, sweep, PYTHONPATH=str(installed))
    assert "2 jobs: 2 done" in table
    assert {path.parent.name for path in tmp_path.glob("sweeps/cnn_digits/*/summary.json")} == {"000", "001"}


@pytest.mark.long
def test_an_editable_installation_is_found_from_the_folder_above_its_checkout(tmp_path: Path) -> None:
    checkout, environment = checked_out(tmp_path), tmp_path / "venv"
    venv.create(environment, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "base.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    python = environment / "bin" / "python"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    done(checkout, [python, "-m", "pip", "install", *options, "-e", "."])
    for folder in (tmp_path, checkout):
        where = "import ddptrain, ddptrain.recipes; print(ddptrain.__file__)"
        assert done(folder, [python, "-c", where]) == f"{checkout}/ddptrain/__init__.py\n"
        asked = done(folder, [python, "-m", "ddptrain", "--help"])
        assert "recipe=<name>" in asked
        assert done(folder, [environment / "bin" / "ddptrain", "--help"]) == asked


# -- a recipe of the user's own, one Python file and one YAML --------------------------------------


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MY_RECIPE, tmp_path / "copied", ignore=shutil.ignore_patterns("__pycache__")))


@pytest.mark.long
def test_a_recipe_with_its_code_in_the_config_dir_trains_and_is_evaluated(
    copied: Path, installed: Path, tmp_path: Path
) -> None:
    home, wheel_first = tmp_path / "home", {"PYTHONPATH": str(installed)}
    home.mkdir()
    program = [sys.executable, "-m", "ddptrain"]
    done(home, [*program, "recipe=my_recipe", "device=cpu", "--config-dir", copied], **wheel_first)
    trained = metrics(home)
    assert trained["error"] < 0.05
    (run,) = home.glob("runs/my_recipe/*")
    for option in (["--config-dir", copied], [f"--config-dir={copied}"]):
        evaluated = done(
            home, [*program, "evaluate", f"run={run}", "checkpoint=last", *option], **wheel_first
        )
        assert json.loads(evaluated)["error"] == trained["error"]


@pytest.mark.long
def test_options_and_overrides_may_stand_in_any_order_and_are_repeated_in_command_txt(
    copied: Path, installed: Path, tmp_path: Path
) -> None:
    home, wheel_first = tmp_path / "home", {"PYTHONPATH": str(installed)}
    home.mkdir()
    program = [sys.executable, "-m", "ddptrain"]
    done(home, [*program, "recipe=my_recipe", "--config-dir", copied, *QUICK], **wheel_first)
    (run,) = home.glob("runs/my_recipe/*")
    words = shlex.split((run / "command.txt").read_text())
    assert words[0] == "python"
    shutil.rmtree(home / "runs")
    done(home, [sys.executable, *words[1:]], **wheel_first)
    assert metrics(home)["error"] > 0


@pytest.mark.long
def test_a_recipe_with_its_code_in_the_current_folder_trains_alone_and_on_two_ranks(
    copied: Path, installed: Path, tmp_path: Path
) -> None:
    home, wheel_first = tmp_path / "home", {"PYTHONPATH": str(installed)}
    home.mkdir()
    shutil.move(copied / "my_recipe.py", home)
    job = ["-m", "ddptrain", f"--config-dir={copied}", "recipe=my_recipe", "device=cpu"]
    done(home, [sys.executable, *job], **wheel_first)
    alone = metrics(home)
    shutil.rmtree(home / "runs")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done(home, [sys.executable, *torchrun, *job], **wheel_first)
    assert metrics(home)["error"] == pytest.approx(alone["error"], rel=1e-4)


@pytest.mark.long
def test_an_installed_package_brings_a_recipe_by_its_entry_point(wheel: Path, tmp_path: Path) -> None:
    package, site, home = tmp_path / "acme", tmp_path / "site", tmp_path / "home"
    for folder in (package / "acme_net" / "conf" / "recipe", site, home):
        folder.mkdir(parents=True)
    (package / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "acme-net"\nversion = "1.0"\n'
        '[project.entry-points."ddptrain.conf"]\nacme = "acme_net.conf"\n'
        '[tool.setuptools]\npackages = ["acme_net", "acme_net.conf"]\n'
        '[tool.setuptools.package-data]\n"acme_net.conf" = ["**/*.yaml"]\n'
    )
    (package / "acme_net" / "__init__.py").touch()
    (package / "acme_net" / "conf" / "__init__.py").touch()
    shutil.copy(MY_RECIPE / "my_recipe.py", package / "acme_net" / "net.py")
    recipe = (MY_RECIPE / "recipe" / "my_recipe.yaml").read_text()
    (package / "acme_net" / "conf" / "recipe" / "acme_net.yaml").write_text(
        recipe.replace("_target_: my_recipe.", "_target_: acme_net.net.")
    )
    install(wheel, site)
    install(package, site)
    job = [sys.executable, "-m", "ddptrain", "recipe=acme_net", *QUICK]
    done(home, job, PYTHONPATH=str(site))
    assert metrics(home)["error"] > 0
    (run,) = home.glob("runs/acme_net/*")
    evaluate = [sys.executable, "-m", "ddptrain", "evaluate", f"run={run}", "checkpoint=last"]
    evaluated = done(home, evaluate, PYTHONPATH=str(site))
    assert json.loads(evaluated)["error"] == metrics(home)["error"]
    choices = done(home, [sys.executable, "-m", "ddptrain", "--help"], PYTHONPATH=str(site))
    assert "acme_net" in choices
    complete = [sys.executable, "-m", "ddptrain", "completion", "words", "ddptrain recipe=ac"]
    assert done(home, complete, PYTHONPATH=str(site)) == "recipe=acme_net \n"
