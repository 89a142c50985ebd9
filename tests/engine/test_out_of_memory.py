"""Which override is named where memory does not suffice."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from torch import nn

import ddptrain
from ddptrain.api.world import World
from ddptrain.config.schema import Config, Train
from ddptrain.distributed.watchdog.watchdog import Watchdog
from ddptrain.engine.out_of_memory import is_lack_of_memory
from ddptrain.engine.plan import Plan
from ddptrain.run.out_of_memory import lack_of_memory
from ddptrain.strategies.fsdp import Fsdp

TORCHS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.25 GiB of which"
    " 1.19 GiB is free. If reserved but unallocated memory is large try setting something"
)
MODEL = (
    "No batch size makes the model smaller: take a smaller one, a device with more memory, or several:"
    " strategy=fsdp."
)
AGAIN = ["blocks.*"]
HALF = (
    "Put fewer samples through the model at once: train.micro_batch=16 (now 32), or train.micro_batch=auto,"
    " which finds the number; the global batch stays 64."
)


def raise_within(files: Sequence[str], text: str) -> None:
    """With frames of these modules in its traceback, the outermost first."""
    first, *rest = files
    line = "raise_within(rest, text)" if rest else "raise RuntimeError(text)"
    names = {"raise_within": raise_within, "rest": rest, "text": text}
    exec(compile(line, f"/x/ddptrain/{first}.py", "exec"), names)


@pytest.mark.parametrize(
    ("files", "phase", "changes", "said"),
    [
        (["engine/loop"], "forward", {}, HALF),
        (["engine/loop", "engine/warmup"], "preparing", {}, HALF),
        (["engine/loop", "data/images/loaders"], "waiting for a batch", {}, HALF),
        (
            ["engine/loop"],
            "backward",
            {"micro_batch": 7},
            "at once: train.micro_batch=3 (now 7); the global batch stays 64.",
        ),
        (["engine/loop"], "forward", {"micro_batch": 1}, "keeping them: train.recompute=[<blocks>]."),
        (
            ["engine/loop"],
            "forward",
            {"micro_batch": 1, "recompute": AGAIN},
            "is about half as much with precision=bf16.",
        ),
        (["engine/loop", "engine/step"], "optimizer", {}, MODEL),
        (["engine/loop", "engine/evaluate"], "evaluating", {}, "train.eval_batch_size=128 (now 256)."),
        (["engine/loop", "engine/evaluate"], "evaluating", {"eval_batch_size": 1}, MODEL),
        (["data/images/data", "data/images/loaders"], "preparing", {}, "data.resident=false."),
        (["engine/state"], "preparing", {}, MODEL),
    ],
)
def test_the_override_that_fits(files: list[str], phase: str, changes: dict[str, Any], said: str) -> None:
    config = Config(train=Train(batch_size=64, **changes), precision="fp32", strategy=toy.auto())
    with pytest.raises(RuntimeError) as raised:
        raise_within(files, TORCHS)
    lack = lack_of_memory(raised.value, config, World(1, 2, 1, 2), f"step 3, {phase}")
    assert lack is not None
    assert not lack.everywhere
    message = str(lack)
    assert message.startswith(
        f"rank 1 at step 3, {phase}: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has"
    )
    assert message.endswith(said)
    assert "1.19 GiB is free. " in message
    assert "try setting" not in message, "what torch's caches might do helps few, and hides what helps most"


FSDP = {"_target_": "ddptrain.strategies.fsdp.Fsdp"}
CUDA = World(1, 2, 1, 2, device=torch.device("cuda", 1))


@pytest.mark.parametrize(
    ("changes", "world", "said"),
    [
        ({"strategy": toy.strict(8)}, World(1, 2, 1, 2), "micro_batch=4 (now 8), or train.micro_batch=auto"),
        ({"strategy": FSDP}, World(1, 2, 1, 2), "train.micro_batch=16 (now 32); the global batch"),
        (
            {"strategy": FSDP, "precision": "bf16", "train": Train(batch_size=2, recompute=AGAIN)},
            World(1, 2, 1, 2),
            "or more ranks.",
        ),
        ({"compile": "max-autotune"}, CUDA, "compile=default train.micro_batch=16 (now 32); the global"),
    ],
)
def test_the_override_fits_strategy_and_compiler(changes: dict[str, Any], world: World, said: str) -> None:
    config = Config(**{"train": Train(batch_size=64), "strategy": toy.auto(), **changes})
    with pytest.raises(RuntimeError) as raised:
        raise_within(["engine/loop"], TORCHS)
    assert said in str(lack_of_memory(raised.value, config, world, "step 3, forward"))


def test_weights_that_an_evaluation_gathers_under_fsdp() -> None:
    def evaluating() -> None:
        raise_within(["strategies/fsdp"], TORCHS)

    with pytest.raises(RuntimeError) as raised:
        evaluating()
    config = Config(train=Train(batch_size=64), strategy=FSDP)
    said = str(lack_of_memory(raised.value, config, CUDA, "step 0, trying an evaluation"))
    assert said.endswith(
        "An evaluation gathers all weights on each GPU: take a smaller model or larger GPUs."
    )


def test_files_that_decide_exist() -> None:
    engine = ("engine/loop", "engine/step", "engine/warmup", "engine/evaluate")
    for name in (*engine, "data/images/loaders", "strategies/fsdp"):
        assert (Path(ddptrain.__file__).parent / f"{name}.py").exists()
    assert "evaluating" in vars(Fsdp)


@pytest.mark.parametrize(
    ("where", "said"), [("forward", HALF.replace("=16 (now 32)", "=32 (now 64)")), ("optimizer", MODEL)]
)
def test_in_a_real_step(where: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watchdogs = []

    def watched(world: World) -> Watchdog:
        watchdogs.append(Watchdog(world))
        return watchdogs[0]

    kind, method = (torch.optim.SGD, "step") if where == "optimizer" else (nn.Linear, "forward")
    plain = getattr(kind, method)

    def refused(*given: Any) -> Any:
        if where == "forward" and not torch.is_grad_enabled():
            return plain(*given)  # of an evaluation, which comes first
        raise RuntimeError(TORCHS)

    monkeypatch.setattr(toy, "Watchdog", watched)
    monkeypatch.setattr(kind, method, refused)
    with pytest.raises(RuntimeError) as raised:
        toy.Fit(Plan(steps=4, train_size=256, batch_size=64)).run(World(), tmp_path)
    config = Config(train=Train(batch_size=64), precision="fp32", strategy=toy.auto())
    lack = lack_of_memory(raised.value, config, World(), watchdogs[0].place)
    assert str(lack).endswith(said)


def test_with_bf16_already_only_a_smaller_model_is_left() -> None:
    config = Config(train=Train(batch_size=2, recompute=AGAIN), precision="bf16", strategy=toy.auto())
    with pytest.raises(RuntimeError) as raised:
        raise_within(["engine/loop"], "CUDA error: out of memory\nCompile with ...")
    lack = lack_of_memory(raised.value, config, World(0, 2, 0, 2), "step 0, forward")
    assert str(lack) == f"rank 0 at step 0, forward: CUDA error: out of memory. {MODEL}"


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not fit"), ValueError("out of memory"), KeyError("x")]
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    assert lack_of_memory(error, Config(), World(), "step 0, forward") is None


@pytest.mark.parametrize(
    "text",
    [
        "FIND was unable to find an engine to execute this computation",
        "GET was unable to find an engine to execute this computation",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    ],
)
def test_libraries_that_find_no_memory_are_recognised(text: str) -> None:
    assert is_lack_of_memory(RuntimeError(text))


@pytest.mark.parametrize("text", ["cuDNN error: CUDNN_STATUS_BAD_PARAM", "CUBLAS_STATUS_EXECUTION_FAILED"])
def test_their_other_errors_are_not(text: str) -> None:
    assert not is_lack_of_memory(RuntimeError(text))
