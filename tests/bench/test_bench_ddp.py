"""``bench ddp=true``."""

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from running import FAULTY
from toy import auto, strict

from ddptrain.config.schema import Config
from ddptrain.errors import UserError
from ddptrain.tools.bench.ddp import of_ddp, ranks_for


def test_what_is_tried_of_ddp() -> None:
    config = Config(recipe="toy", task={}, data={}, optim={}, strategy=auto(compression="bf16"))
    assert of_ddp(config, {"gradient_bytes": 30 << 20}) == [
        "strategy.bucket_cap_mb=1", "strategy.bucket_cap_mb=5", "strategy.bucket_cap_mb=100",
        "strategy.static_graph=true", "strategy.gradient_as_bucket_view=false", "strategy.compression=none",
        "strategy.compression=fp16",
    ]  # fmt: skip
    small = of_ddp(config, {"gradient_bytes": 1 << 20})
    assert not [word for word in small if "bucket_cap" in word], "one bucket under any of them"
    more = of_ddp(config, {"gradient_bytes": 2 << 20})
    caps = [word.partition("cap_mb=")[2] for word in more if "bucket_cap" in word]
    assert caps == ["5", "100"], "one bucket; now it is torch's small first one and another"


def bench(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "ddptrain", "bench", *words]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=280)


def test_where_ddp_has_nothing_to_do_it_is_said(tmp_path: Path) -> None:
    done = bench(tmp_path, "recipe=cnn_digits", "ddp=true", "ranks=1")
    assert done.returncode == 2
    assert done.stderr.startswith("ddptrain: ranks=1: ddp=true measures what ranks send each other")
    assert not done.stdout
    config = Config(recipe="toy", task={}, data={}, optim={}, device="cpu", strategy=auto())
    assert ranks_for(config, None) == 2
    assert ranks_for(config, 3) == 3
    with pytest.raises(UserError, match="Strict: ddp=true measures"):
        ranks_for(replace(config, strategy=strict()), 2)


@pytest.mark.long
def test_ddps_settings_are_tried(tmp_path: Path) -> None:
    fast = ["recipe=faulty", f"--config-dir={FAULTY}", "device=cpu", "rounds=3", "steps=5", "ddp=true"]
    tries = ["strategy.static_graph=true", "strategy.compression=fp16"]
    done = bench(tmp_path, *fast, f"try={';'.join(tries)}")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(strategy\.\S+)  x", done.stderr, re.M)[:3] == tries
    [line] = re.findall(r"python -m ddptrain (launch .*)", done.stdout)
    assert shlex.split(line)[:2] == ["launch", "--nproc-per-node=2"]
    [step] = re.findall(r"^as it is +([\d.]+) ms a step", done.stderr, re.M)
    [row] = re.findall(r"^  as it is .*", done.stdout, re.M)
    assert row.split()[6] == step, "one figure wherever the training as it is is told of"
    assert not list(tmp_path.iterdir())
