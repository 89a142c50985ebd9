"""The graph of files by their imports: lazy ones, type checkers' and those of an `__init__` too."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [
    file.relative_to(ROOT)
    for folder in ("ddptrain", "recipes", "hydra_plugins")
    for file in sorted((ROOT / folder).rglob("*.py"))
    if not (ROOT / folder / file.relative_to(ROOT / folder).parts[0]).is_symlink()
]
FLOORS = (
    *("text", "api", "distributed", "doctor", "data", "recipes", "strategies", "observe", "engine"),
    *("config", "run", "tools", "verbs", "python"),
)
"""From the ground up. "text": the modules of ddptrain/ that stand in no folder."""
_ABOVE_ALL = ("ddptrain/__init__.py", "ddptrain/__main__.py")
_BESIDE = {"ddptrain/testing.py": "api", "hydra_plugins/ddptrain_sweep": "text"}
"""Files of other folders, and the floor that they belong to: the plugin imports Hydra alone."""


def floor_of(file: Path) -> str:
    for beside, floor in _BESIDE.items():
        if file.is_relative_to(beside):
            return floor
    if str(file) in _ABOVE_ALL:
        return FLOORS[-1]
    folder, *inner = file.parts
    if folder == "ddptrain":
        return inner[0] if len(inner) > 1 else FLOORS[0]
    return folder


def imports() -> dict[Path, set[Path]]:
    """The files that each file imports."""
    modules = {_module(file): file for file in FILES}
    modules |= {f"ddptrain.{name}": file for name, file in modules.items() if name.startswith("recipes")}
    return {
        file: {modules[name] for name in _named(file, modules) if name in modules} - {file} for file in FILES
    }


def _module(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _named(file: Path, modules: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else str(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (str(word.value) for word in node.args if isinstance(word, ast.Constant))
