"""Imports point one way, without a circle (docs/architecture.md)."""

import re
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.structure.import_graph import FILES, FLOORS, ROOT, floor_of, imports

TOOLS = sorted(path.parent.name for path in (ROOT / "ddptrain/tools").glob("*/__init__.py"))
READS = {"report": {"sweep", "trackers"}, "serve": {"report", "sweep", "trackers"}}
"""Tools that show or send what another one has written."""
VERBS_OF = {"sweep": "multirun"}
"""Where a tool's verb has another name."""
KNOW_HYDRA = ("ddptrain/config/", "ddptrain/tools/sweep/hydra_sweep.py", "hydra_plugins/")


def test_no_circle_among_files() -> None:
    tuple(TopologicalSorter(imports()).static_order())  # raises CycleError, which names one


def test_no_file_imports_from_a_floor_above() -> None:
    graph = imports()
    assert sum(map(len, graph.values())) > 500
    up = [
        f"{file} -> {other}"
        for file, others in graph.items()
        for other in others
        if FLOORS.index(floor_of(other)) > FLOORS.index(floor_of(file))
    ]
    assert not up


def test_a_tool_is_known_to_its_verb_alone() -> None:
    known = [
        f"{file} -> {other}"
        for file, others in imports().items()
        for other in others
        if floor_of(other) == "tools" and len(other.parts) > 3 and not may_know(file, other.parts[2])
    ]
    assert not known


def may_know(file: Path, tool: str) -> bool:
    if floor_of(file) == "tools":
        return file.parts[2] == tool or tool in READS.get(file.parts[2], ())
    return file == Path(f"ddptrain/verbs/{VERBS_OF.get(tool, tool)}.py")


@pytest.mark.parametrize("path", FILES, ids=str)
def test_only_composing_knows_hydra(path: Path) -> None:
    if not str(path).startswith(KNOW_HYDRA):
        assert not re.search(r"^\s*(import|from) hydra(\.| )", (ROOT / path).read_text(), re.M)


def test_what_trains_knows_no_config() -> None:
    """It gets plain values, so that each part can be used without a config."""
    below = FLOORS[: FLOORS.index("config")]
    named = [
        str(path)
        for path in FILES
        if floor_of(path) in below and re.search(r"\bConfig\b(?! )", code_of(path))
    ]
    assert not named


def code_of(path: Path) -> str:
    return re.sub(r'"""(?:.|\n)*?"""', "", (ROOT / path).read_text())


TRAINS = """
import sys
from ddptrain.verbs.main import main
sys.exit(main(["recipe=cnn_digits", "device=cpu", "train.steps=1", "run.dir=run", "observers=[console]"]))
"""


@pytest.mark.parametrize("tool", TOOLS)
def test_without_a_tool_the_rest_trains(tool: str, tmp_path: Path) -> None:
    """It, what reads what it writes, and their verbs are taken away."""
    gone = {tool, *(reader for reader, written in READS.items() if tool in written)}
    for folder in ("ddptrain", "recipes", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True)
    for name in gone:
        shutil.rmtree(tmp_path / "ddptrain/tools" / name)
        (tmp_path / f"ddptrain/verbs/{VERBS_OF.get(name, name)}.py").unlink(missing_ok=True)
    ended = subprocess.run(
        [sys.executable, "-c", TRAINS], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run/summary.json").is_file()


def test_a_recipe_observer_controller_or_strategy_needs_the_api_alone() -> None:
    """As docs/ show them. A kind of data stands on the pipeline of the others."""
    doors = tuple(f"from ddptrain.{door} import " for door in ("api", "data.identity", "data.pipeline"))
    for page in ("recipes", "observers", "controllers", "strategies"):
        lines = (ROOT / f"docs/{page}.md").read_text().splitlines()
        imports = [line for line in lines if line.startswith(("from ddptrain", "import ddptrain"))]
        assert imports
        assert all(line.startswith(doors) for line in imports), imports
