"""Imports point one way (design section 5), and no module outgrows an afternoon."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted([*ROOT.glob("ddptrain/**/*.py"), *ROOT.glob("recipes/**/*.py")])

MAY_IMPORT = {
    "errors": set(),
    "protocols": {"data", "distributed"},  # names in annotations only
    "config": {"errors", "config"},
    "build": {"config", "errors", "targets"},
    "targets": {"config", "errors"},
    "doctor": {"errors", "doctor"},
    "distributed": {"collecting", "config", "doctor", "errors", "distributed"},
    "data": {"distributed", "errors", "protocols", "data"},
    "observe": {"config", "distributed", "errors", "protocols", "observe"},
    "engine": {"build", "config", "data", "distributed", "errors", "observe", "protocols", "engine"},
    "testing": {"distributed"},
    "commands": {
        "build",
        "config",
        "data",
        "distributed",
        "doctor",
        "engine",
        "errors",
        "observe",
        "protocols",
        "commands",
        "sweep",
    },
    "collecting": set(),
    "arguments": {"config", "errors"},
    "compose": {"arguments", "config", "errors", "explain", "sources"},
    "explain": {"arguments", "config", "errors", "sources"},
    "multirun": {"arguments", "compose", "errors", "sweep"},
    "user_code": {"build", "compose", "errors"},
    "recorded": {"errors"},
    "saved": {"arguments", "commands", "compose", "config", "errors", "recorded"},
    "sweep": {"config", "distributed", "doctor", "engine", "errors", "observe", "sweep"},
    "sources": {"config", "errors"},
    "cli": {
        "arguments",
        "build",
        "collecting",
        "compose",
        "config",
        "distributed",
        "errors",
        "commands",
        "multirun",
        "recorded",
        "saved",
        "sweep",
        "user_code",
    },
    "__main__": {"cli", "distributed"},
    "recipes": {"protocols", "data", "errors", "recipes"},
}


def room(path: Path) -> str:
    if path.is_relative_to(ROOT / "recipes"):
        return "recipes"
    inner = path.relative_to(ROOT / "ddptrain").parts
    return inner[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
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
    assert imported(path) <= MAY_IMPORT[room(path)]
    assert len(path.read_text().splitlines()) <= 310


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_composing_knows_hydra(path: Path) -> None:
    if path.name not in ("compose.py", "explain.py", "multirun.py", "sources.py"):
        assert "import hydra" not in path.read_text()
        assert "from hydra" not in path.read_text()
