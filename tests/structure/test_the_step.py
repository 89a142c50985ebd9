"""The way to the optimizer is as docs/architecture.md says; a constructor sets all that an object holds."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "ddptrain/engine"


def is_assigned_to_self(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def test_no_attribute_of_an_engine_or_a_step_is_born_later() -> None:
    for file, name in (("loop.py", "Engine"), ("step.py", "TrainStep")):
        tree = ast.parse((ENGINE / file).read_text())
        (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        assigned = {
            method.name: {ast.unparse(node) for node in ast.walk(method) if is_assigned_to_self(node)}
            for method in found.body
            if isinstance(method, ast.FunctionDef)
        }
        made = assigned.pop("__init__")
        assert made
        assert set().union(*assigned.values()) <= made


STACK = """
import sys, traceback
import torch

def step(self, closure=None):
    for frame in traceback.extract_stack():
        if "/ddptrain/" in frame.filename and frame.name != "<module>":
            print("STACK", frame.filename.rpartition("/ddptrain/")[2], frame.name)
    sys.exit(0)

torch.optim.AdamW.step = step
from ddptrain.verbs.main import main
from ddptrain.distributed.launcher.process import end_with
end_with(main, sys.argv[1:])
"""


def test_the_way_from_the_shell_to_the_optimizer(tmp_path: Path) -> None:
    words = ["recipe=cnn_digits", "device=cpu", "train.steps=1"]
    done = subprocess.run(
        [sys.executable, "-c", STACK, *words], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    calls = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("STACK")]
    assert 3 < len(calls) <= 9
    assert len({file for file, _ in calls}) <= 7
    page = (ROOT / "docs/architecture.md").read_text().partition("`optimizer.step()`: ")[2]
    for file, name in calls:
        assert f"`{file}`" in page
        assert f"{name}`" in page
