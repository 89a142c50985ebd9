"""docs/examples: each plain script and its port to ``ddptrain.fit``."""

import difflib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from shell import ddptrain

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
NAMES = sorted(path.name.removesuffix("_plain.py") for path in EXAMPLES.glob("*_plain.py"))
MOST = 15
"""Lines that differ."""


@pytest.mark.parametrize("name", NAMES)
def test_a_port_is_short(name: str) -> None:
    plain, port = (EXAMPLES / f"{name}_{kind}.py" for kind in ("plain", "fit"))
    lines = difflib.ndiff(plain.read_text().splitlines(), port.read_text().splitlines())
    assert sum(line.startswith(("+ ", "- ")) for line in lines) <= MOST


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_the_plain_script_runs(name: str, tmp_path: Path) -> None:
    plain = [sys.executable, str(EXAMPLES / f"{name}_plain.py")]
    assert subprocess.run(plain, cwd=tmp_path, capture_output=True, timeout=200).returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_port_has_the_same_losses_on_one_and_two_ranks(name: str, tmp_path: Path) -> None:
    losses, script = [], EXAMPLES / f"{name}_fit.py"
    for ranks in (1, 2):
        words = f"launch --nproc-per-node={ranks} --script={script} device=cpu run.dir={ranks}"
        words += " train.steps=20 log.every=1"  # later, rounding is amplified by the training itself
        ended = ddptrain(tmp_path, words)
        assert ended.code == 0, ended.err
        rows = map(json.loads, (tmp_path / f"{ranks}/metrics.jsonl").read_text().splitlines())
        losses.append([row["loss"] for row in rows])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
