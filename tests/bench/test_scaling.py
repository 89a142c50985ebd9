"""``bench ddp=true``: the estimate for more nodes, the all-reduces it is fed with, and the verb itself."""

import itertools
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from running import FAULTY
from toy import auto

from ddptrain.api.world import World
from ddptrain.bench.allreduce_bench import measured, sizes_up_to
from ddptrain.bench.ddp import of_ddp, ranks_for
from ddptrain.bench.scaling import LinkModel, Step, estimated, fitted, misses
from ddptrain.config.schema import Config
from ddptrain.errors import UserError
from ddptrain.testing import run_ranks

LINKS = st.builds(LinkModel, st.floats(1e-6, 1e-2), st.floats(1e6, 1e12))
RANKS = st.integers(2, 16)
SHARES = st.floats(0, 1)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    seconds = draw(st.floats(1e-4, 10))
    backward = seconds * draw(SHARES)
    exposed = (seconds - backward) * draw(SHARES)
    sizes = draw(st.lists(st.floats(1, 1e9), min_size=1, max_size=4))
    return Step(seconds, backward, exposed, draw(st.integers(1, 4096)), draw(RANKS), sizes)


@given(steps(), LINKS)
def test_one_node_is_as_measured_and_more_are_never_more_efficient(step: Step, link: LinkModel) -> None:
    found = [estimated(step, link, nodes) for nodes in (1, 2, 3, 4, 8, 16, 1000)]
    assert (found[0].lower, found[0].upper) == (1, 1)
    for fewer, more in itertools.pairwise(found):
        assert 0 < more.lower <= more.upper <= 1
        assert more.lower <= fewer.lower + 1e-12
        assert more.upper <= fewer.upper + 1e-12


@given(steps(), LINKS, st.integers(2, 64), st.floats(1.1, 100))
def test_faster_links_scale_better(step: Step, link: LinkModel, nodes: int, times: float) -> None:
    bound = estimated(step, link, nodes)
    faster = estimated(step, LinkModel(link.latency_s / times, link.bytes_per_s * times), nodes)
    assert faster.lower >= bound.lower * (1 - 1e-12)
    assert estimated(step, LinkModel(0, float("inf")), nodes).upper == 1


@given(LINKS, RANKS)
def test_an_all_reduce_grows_with_ranks_and_bytes(link: LinkModel, ranks: int) -> None:
    sizes = [0, 1, 1e3, 1e6, 1e9]
    times = [link.all_reduce_s(ranks, size) for size in sizes]
    assert times == sorted(times)
    assert all(link.all_reduce_s(ranks + 1, size) >= link.all_reduce_s(ranks, size) for size in sizes)
    assert link.all_reduce_s(1, 1e6) == 0


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e12), st.integers(2, 3))
def test_the_link_behind_the_times_is_found(latency: float, rate: float, ranks: int) -> None:
    """Of two or three ranks, for which a tree is never shorter than a ring."""
    link, sizes = LinkModel(latency, rate), [1 << 10, 1 << 14, 1 << 20, 1 << 26]
    times = [(size, link.all_reduce_s(ranks, size)) for size in sizes]
    found = fitted(times, ranks)
    assert max(misses(found, times, ranks)) < 1e-6


@given(st.lists(st.tuples(st.integers(1, 10**8), st.floats(1e-7, 10)), min_size=2, unique_by=lambda p: p[0]))
def test_any_times_make_a_link(times: list[tuple[int, float]]) -> None:
    link = fitted(times, 2)
    assert link.latency_s >= 0
    assert link.bytes_per_s > 0


def test_real_all_reduces_are_longer_for_more_bytes() -> None:
    sizes = sizes_up_to(1)
    assert sizes[0] == 1 << 10
    assert sizes[-1] == 1 << 22
    assert sizes_up_to(6 << 20)[-1] == 1 << 24
    assert sizes_up_to(1 << 40)[-1] == 1 << 26

    def rank(world: World) -> list[float]:
        return measured(world, [sizes[0], sizes[-1]])

    for short, long in run_ranks(rank, 2):
        assert 0 < short < long


def test_what_is_tried_of_ddp() -> None:
    config = Config(recipe="toy", task={}, data={}, optim={}, strategy=auto(compression="bf16"))
    assert of_ddp(config, {"gradient_bytes": 30 << 20}) == [
        "strategy.bucket_cap_mb=1", "strategy.bucket_cap_mb=5", "strategy.bucket_cap_mb=100",
        "strategy.static_graph=true", "strategy.gradient_as_bucket_view=false", "strategy.compression=none",
        "strategy.compression=fp16", "strategy.compression=powersgd",
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
    with pytest.raises(UserError, match="elastic=strict: adds up gradients by itself"):
        ranks_for(replace(config, elastic="strict"), 2)


@pytest.mark.long
def test_ddps_settings_are_tried_and_more_nodes_estimated(tmp_path: Path) -> None:
    fast = ["recipe=faulty", f"--config-dir={FAULTY}", "device=cpu", "rounds=3", "steps=5", "ddp=true"]
    tries = ["strategy.static_graph=true", "strategy.compression=fp16", "strategy.compression=powersgd"]
    done = bench(tmp_path, *fast, f"try={';'.join(tries)}")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(strategy\.\S+)  x", done.stderr, re.M)[:3] == tries
    [line] = re.findall(r"python -m ddptrain (launch .*)", done.stdout)
    assert shlex.split(line)[:2] == ["launch", "--nproc-per-node=2"]
    assert re.search(r"exposed +[\d.]+ ms of a step's [\d.]+ ms \(\d+%\) wait for gradients", done.stdout)
    assert re.search(r"latency \d+ us and [\d.]+ GB/s between neighbours", done.stdout)
    table = re.findall(r"^ +(\d+) +(\d+) +([\d,]+) .*?(\d+)%( to (\d+)%)?", done.stdout, re.M)
    assert [(int(row[0]), int(row[1])) for row in table] == [(n, 2 * n) for n in (1, 2, 4, 8, 16)]
    assert "An upper bound" in done.stdout
    [step] = re.findall(r"^as it is +([\d.]+) ms a step", done.stderr, re.M)
    [row] = re.findall(r"^  as it is .*", done.stdout, re.M)
    assert row.split()[6] == step, "one figure wherever the training as it is is told of"
    assert f"of a step's {step} ms" in done.stdout
    noise = float(re.findall(r"against itself x([\d.]+)", done.stderr)[0])
    if not 0.86 < noise < 1.16:
        assert "Noise: the training against itself is x" in done.stdout
    assert not list(tmp_path.iterdir())
