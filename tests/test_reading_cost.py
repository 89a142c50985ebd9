"""What has to be read for a change: as docs/architecture.md says."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGINE = ROOT / "ddptrain/engine"
STEP = [ENGINE / f"{name}.py" for name in ("step", "health", "loss_scale", "phases", "seeding")]


def lines(*files: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def test_reading_costs_what_the_page_says() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    said = dict(re.findall(r"^\| (\w[^|(]*?)(?: \([^|]*\))? \|.*\| (\d+) \|$", page, re.M))
    found = {
        "change the step": lines(*STEP, ROOT / "ddptrain/api/strategy.py", ROOT / "ddptrain/api/rng.py"),
        **{f"add {what}": lines(ROOT / "docs" / name) for what, name in (
            ("a recipe", "recipes.md"), ("an observer", "observers.md"), ("a controller", "controllers.md"),
            ("a strategy", "strategies.md"))},
    }  # fmt: skip
    assert said.keys() == found.keys()
    for what, count in found.items():
        assert int(said[what]) - 25 < count <= int(said[what]), f"{what}: {count}"
    assert found["change the step"] <= 750
    assert found["add an observer"] <= 60


def is_assigned_to_self(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def test_an_engine_and_a_step_have_few_attributes_and_none_is_born_later() -> None:
    for file, name, most in (("loop.py", "Engine", 12), ("step.py", "TrainStep", 18)):
        tree = ast.parse((ENGINE / file).read_text())
        (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        assigned = {
            method.name: {ast.unparse(node) for node in ast.walk(method) if is_assigned_to_self(node)}
            for method in found.body
            if isinstance(method, ast.FunctionDef)
        }
        made = assigned.pop("__init__")
        assert made
        assert len(made) <= most
        assert set().union(*assigned.values()) <= made
