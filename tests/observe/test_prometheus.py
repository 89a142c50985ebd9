"""What Prometheus scrapes while a run goes on, and the dashboard that shows it."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from shell import RANK_VARIABLES, refusal

from ddptrain.api.observer import End, Evaluated, Log, Result, RunInfo, Saved, Start, Times
from ddptrain.api.timing import PHASES, Lap, Timing
from ddptrain.api.world import World
from ddptrain.observe.prometheus import Prometheus

ROOT = Path(__file__).parents[2]
WORDS = "recipe=cnn_digits device=cpu model.width=8 observers=[console,jsonl,prometheus] run.dir=run"
PORT = re.compile(r"prometheus http://127\.0\.0\.1:(\d+)/metrics\n")
NO_TIME = dict.fromkeys(PHASES, 0.0)
GPU = {
    "utilisation": 91.0, "memory_gib": 2.0, "power_w": 300.0, "temperature_c": 61.0, "clock_mhz": 1980.0,
    "throttled": 0.0,
}  # fmt: skip


class TwoRanks:
    """Readings of a GPU each."""

    def latest(self) -> dict[str, float]:
        ranks = {f"gpu{rank}/{name}": value for rank in (0, 1) for name, value in GPU.items()}
        return {**ranks, "host0/cpu": 50.0, "host0/memory_gib": 4.0, "host0/process_gib": 1.0}

    def summary(self) -> dict[str, float]:
        return {}

    def timings(self) -> dict[int, Timing]:
        return {rank: Timing({**NO_TIME, "forward": 2.5 + rank}) for rank in (0, 1)}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def scraped(port: int) -> dict[str, Metric]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {metric.name: metric for metric in text_string_to_metric_families(text)}


def value(metrics: dict[str, Metric], name: str, /, **labels: str) -> float:
    """Of the one sample with these labels."""
    [sample] = [sample for sample in metrics[name].samples if labels.items() <= sample.labels.items()]
    return float(sample.value)


END = End(40, 40, Result("done", {}, {}, True), Times(Timing(), [], 1.0, 0.0))


@pytest.fixture
def observer(tmp_path: Path) -> Iterator[Prometheus]:
    observer = Prometheus(port=free_port())
    config = {"recipe": 'odd "name"\\with\nlines'}
    run = RunInfo(tmp_path / "mine", config, World(size=2, local_size=2), steps=40, devices=TwoRanks())
    observer.start(Start(0, 40, False, None, run))
    yield observer
    observer.end(END)


def port_of(observer: Prometheus) -> int:
    assert observer._server is not None
    return observer._server[0].server_port


def logged(observer: Prometheus, folder: Path) -> None:
    """A log step, an evaluation and a checkpoint that was written 100 s before."""
    manifest = folder / "step-20/manifest.json"
    manifest.parent.mkdir()
    manifest.touch()
    os.utime(manifest, (time.time() - 100, time.time() - 100))
    timing = Timing({**NO_TIME, "forward": 2.0}, samples=300, flops=1e6, peak=1e9)
    observer.log(Log(20, 1.5, 640, {"loss": 0.25, "lr": float("nan")}, Lap(timing)))
    metrics = {"accuracy": 0.75, "accuracy/cat": 0.5}
    observer.evaluated(Evaluated(20, 1.5, 640, metrics, {}, 1.0, True, timing, "accuracy", True, 40))
    observer.saved(Saved(20, manifest.parent))


def test_before_anything_is_logged(observer: Prometheus) -> None:
    metrics = scraped(port_of(observer))
    facts = {"run": "mine", "recipe": 'odd "name"\\with\nlines', "world_size": "2"}
    assert value(metrics, "ddptrain_run_info", **facts) == 1
    assert value(metrics, "ddptrain_steps") == 40
    assert "ddptrain_step" not in metrics


def test_values_in_base_units(observer: Prometheus, tmp_path: Path) -> None:
    logged(observer, tmp_path)
    time.sleep(0.2)
    seen = scraped(port_of(observer))
    expected = {
        "step": 20, "epoch": 1.5, "samples": 640, "samples_per_second": 150, "flop_utilisation_ratio": 0.15,
        "checkpoint_step": 20, "host_cpu_ratio": 0.5, "host_memory_bytes": 2**32,
        "host_process_memory_bytes": 2**30, "restarts": 0,
    }  # fmt: skip
    for name, number in expected.items():
        assert value(seen, f"ddptrain_{name}", run="mine") == pytest.approx(number)
    assert value(seen, "ddptrain_train", name="loss") == 0.25
    assert str(value(seen, "ddptrain_train", name="lr")) == "nan"
    assert value(seen, "ddptrain_valid", name="accuracy/cat") == 0.5
    assert 100.2 <= value(seen, "ddptrain_checkpoint_age_seconds") < 110
    for rank in ("0", "1"):
        assert value(seen, "ddptrain_phase_seconds", rank=rank, phase="forward") == 2.5 + int(rank)
        assert value(seen, "ddptrain_gpu_utilisation_ratio", gpu=rank) == pytest.approx(0.91)
        assert value(seen, "ddptrain_gpu_memory_bytes", gpu=rank) == 2**31
        assert value(seen, "ddptrain_gpu_clock_hertz", gpu=rank) == 1.98e9
    for metric in seen.values():
        assert metric.documentation
        assert len({str(sorted(sample.labels.items())) for sample in metric.samples}) == len(metric.samples)


def test_the_next_free_port(observer: Prometheus, tmp_path: Path) -> None:
    other = Prometheus(port=port_of(observer))
    other.start(Start(0, 40, False, None, RunInfo(tmp_path / "other")))
    assert port_of(other) > port_of(observer)
    assert value(scraped(port_of(other)), "ddptrain_run_info", run="other") == 1
    other.end(END)
    with pytest.raises(OSError, match="refused"):
        scraped(port_of(other))


def test_a_port_that_is_none(tmp_path: Path) -> None:
    said = refusal(tmp_path, f"{WORDS} observers.prometheus.port=70000")
    assert said.startswith("observers.prometheus.port=70000: must be 0 to 65535.")


def test_without_the_library(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['prometheus_client'] = None")
    said = refusal(tmp_path, WORDS, PYTHONPATH=str(tmp_path))
    assert said.startswith(
        "observers=prometheus: needs prometheus-client: pip install 'ddptrain[prometheus]'."
    )


def test_a_run_is_seen_while_it_runs(tmp_path: Path) -> None:
    """On two ranks: each one's time by phase is there, at the address that the run tells."""
    words = f"launch --nproc-per-node=2 {WORDS} observers.prometheus.port=0 log.every=5 train.epochs=1000"
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    said = tmp_path / "said"
    seen: dict[str, Metric] = {}
    until, ranks, steps = time.monotonic() + 60, set[str](), set[float]()
    with said.open("w") as file, subprocess.Popen(
        [sys.executable, "-m", "ddptrain", *words.split()],
        cwd=tmp_path, env={**environment, "OMP_NUM_THREADS": "1"}, stderr=file,
    ) as job:  # fmt: skip
        try:
            while (len(ranks) < 2 or len(steps) < 2) and time.monotonic() < until:
                time.sleep(0.3)
                if (
                    address := re.search(r"prometheus http://127.0.0.1:(\d+)/metrics\n", said.read_text())
                ) is None:
                    continue
                seen = scraped(int(address[1]))
                if "ddptrain_phase_seconds" in seen:
                    ranks = {sample.labels["rank"] for sample in seen["ddptrain_phase_seconds"].samples}
                if "ddptrain_step" in seen:
                    steps.add(value(seen, "ddptrain_step", run="run"))
        finally:
            job.terminate()
            job.wait(timeout=60)
    assert ranks == {"0", "1"}, (seen, said.read_text())
    assert len(steps) >= 2


def test_the_dashboard_loads_and_asks_for_what_there_is(observer: Prometheus, tmp_path: Path) -> None:
    logged(observer, tmp_path)
    known = {sample.name for metric in scraped(port_of(observer)).values() for sample in metric.samples}
    written = json.loads((ROOT / "launch/grafana.json").read_text())
    dashboard = Dashboard.from_json(written)
    assert dashboard.title == "ddptrain"
    assert dashboard.panels is not None
    assert len(dashboard.panels) == len(written["panels"]) > 10
    queries = [target["expr"] for panel in written["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"ddptrain_\w+", query)}
    assert asked <= known
    assert len(asked) > 10
