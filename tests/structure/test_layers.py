"""Imports point one way, without a circle (docs/architecture.md)."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted([*ROOT.glob("ddptrain/**/*.py"), *ROOT.glob("recipes/**/*.py")])

MAY_IMPORT = {
    "errors": set(),
    "torch_private": set(),
    "text": set(),
    "config": {"errors"},
    "api": {"config", "errors"},
    "distributed": {"api", "errors", "text"},
    "watchdog": {"api", "errors"},
    "launcher": {"config", "errors", "text"},
    "data": {"api", "distributed", "errors", "launcher", "text"},
    "strategies": {"api", "config", "distributed", "errors", "torch_private"},
    "observe": {"api", "config", "distributed", "errors", "text"},
    "engine": {
        "api", "config", "data", "distributed", "errors", "observe", "text", "torch_private", "watchdog",
    },
    "report": {"observe", "text"},
    "doctor": {"distributed", "errors", "text"},
    "sweep": {"api", "config", "distributed", "doctor", "errors", "launcher", "observe", "text"},
    "bench": {"api", "config", "distributed", "doctor", "errors", "launcher", "strategies", "text"},
    "prove": {"config", "engine", "errors", "text"},
    "commands": {
        "api", "bench", "config", "distributed", "doctor", "engine", "errors", "launcher", "observe",
        "prove", "report", "strategies", "sweep", "text", "torch_private", "watchdog",
    },
    "cli": {"commands", "config", "errors", "launcher", "prove", "sweep", "text"},
    "python": {"cli", "commands", "errors", "launcher", "observe", "text"},
    "__main__": {"cli", "launcher"},
    "testing": {"api"},
    "recipes": {"api", "data"},
}  # fmt: skip
"""Of each room, without itself."""
MOST_ARROWS = 95


def room(path: Path) -> str:
    if path.is_relative_to(ROOT / "recipes"):
        return "recipes"
    inner = path.relative_to(ROOT / "ddptrain").parts
    return inner[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Rooms that a module imports, annotations' among them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.startswith("ddptrain."):
                found.add(name.split(".")[1])
            if name == "ddptrain" and isinstance(node, ast.ImportFrom):
                found |= {a.name for a in node.names if a.name in MAY_IMPORT}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_room_may(path: Path) -> None:
    if path.name == "__init__.py" and path.parent == ROOT / "ddptrain":
        return
    assert imported(path) <= MAY_IMPORT[room(path)] | {room(path)}


def test_rooms_stand_in_an_order_with_few_arrows() -> None:
    tuple(TopologicalSorter(MAY_IMPORT).static_order())  # raises CycleError
    assert sum(map(len, MAY_IMPORT.values())) < MOST_ARROWS


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_composing_knows_hydra(path: Path) -> None:
    if path.name not in ("compose.py", "explain.py", "hydra_sweep.py", "overrides.py", "search_path.py"):
        assert not re.search(r"^\s*(import|from) hydra(\.| )", path.read_text(), re.M)


def test_a_recipe_observer_controller_or_strategy_needs_the_api_alone() -> None:
    """As docs/ show them."""
    for page in ("recipes", "observers", "controllers", "strategies"):
        lines = (ROOT / f"docs/{page}.md").read_text().splitlines()
        imports = [line for line in lines if line.startswith(("from ddptrain", "import ddptrain"))]
        assert imports
        assert all(line.startswith("from ddptrain.api import ") for line in imports), imports
