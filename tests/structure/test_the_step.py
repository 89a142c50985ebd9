"""The way to the optimizer is as docs/architecture.md says; a constructor sets all that an object holds."""

import ast
import subprocess
import sys
from pathlib import Path

from tests.structure.import_graph import FILES, ROOT

OF_OTHERS = {"_Agent": {"_remaining_restarts"}, "_LogFile": {"stream"}}
"""Attributes that a class of torch or logging has set."""


def own_attributes(node: ast.AST) -> set[str]:
    """What is assigned to self within."""
    return {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    }


def test_a_constructor_sets_all_that_an_object_holds() -> None:
    classes = [
        node
        for file in FILES
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert len(classes) > 300
    bases = {node.name: {ast.unparse(base).partition("[")[0] for base in node.bases} for node in classes}
    constructed: dict[str, set[str]] = {}
    later: dict[str, set[str]] = {}
    for node in classes:
        here = constructed.setdefault(node.name, set(OF_OTHERS.get(node.name, ())))
        for part in node.body:
            if isinstance(part, ast.AnnAssign | ast.Assign):
                here |= {
                    ast.unparse(of)
                    for of in (part.targets if isinstance(part, ast.Assign) else [part.target])
                }
            elif isinstance(part, ast.FunctionDef):
                first = part.name in ("__init__", "__post_init__", "__new__")
                (here if first else later.setdefault(node.name, set())).update(own_attributes(part))

    def known(name: str) -> set[str]:
        return constructed.get(name, set()).union(*map(known, bases.get(name, ())))

    assert {
        name: missing for name, attributes in later.items() if (missing := attributes - known(name))
    } == {}


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
