"""docs/examples: each plain script and its port to ``ddptrain.fit``."""

import difflib
import json
import os
import statistics
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


def figure_of(script: str, home: Path) -> float:
    """What it prints at its end."""
    home.mkdir()
    (home / "script.py").write_text(script)
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "script.py"], cwd=home, env=one_thread, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return float(ended.stdout.split()[-1])


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_port_reaches_the_figure_of_the_plain_script(name: str, tmp_path: Path) -> None:
    """Within the spread of three seeds: of the weights, and of the order, which is another one in `fit`."""
    figures: dict[str, list[float]] = {"plain": [], "fit": []}
    for seed in range(3):
        for kind, of_kind in figures.items():
            script = (EXAMPLES / f"{name}_{kind}.py").read_text()
            assert script.count("torch.manual_seed(0)") == 1
            script = script.replace("torch.manual_seed(0)", f"torch.manual_seed({seed})")
            script = script.replace("valid_loader, loss", f"valid_loader, 'seed={seed}', loss")
            of_kind.append(figure_of(script, tmp_path / f"{kind}-{seed}"))
    spread = max(max(of_kind) - min(of_kind) for of_kind in figures.values())
    assert abs(statistics.mean(figures["plain"]) - statistics.mean(figures["fit"])) <= spread, figures


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_port_has_the_same_losses_on_one_and_two_ranks(name: str, tmp_path: Path) -> None:
    losses, script = [], EXAMPLES / f"{name}_fit.py"
    for ranks in (1, 2):
        words = f"launch --nproc-per-node={ranks} --script={script} device=cpu run.dir={ranks} log.every=1"
        ended = ddptrain(tmp_path, words)
        assert ended.code == 0, ended.err
        rows = map(json.loads, (tmp_path / f"{ranks}/metrics.jsonl").read_text().splitlines())
        losses.append([row["loss"] for row in rows if row["split"] == "train"])
    one, two = losses
    assert one[:100] == pytest.approx(two[:100], rel=1e-5)
    assert one == pytest.approx(two, rel=1e-3), "rounding grows with the steps, faster on some processors"


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_port_that_is_killed_has_the_bits_of_one_that_is_not(name: str, tmp_path: Path) -> None:
    words = f"prove resume ranks=2 kills=2 device=cpu --script={EXAMPLES / f'{name}_fit.py'}"
    ended = ddptrain(tmp_path, words)
    assert ended.code == 0, ended.out + ended.err
    assert "HOLDS" in ended.out
