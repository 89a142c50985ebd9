"""Which override is named where memory does not suffice."""

from collections.abc import Sequence

import pytest

from ddptrain.api.world import World
from ddptrain.config.schema import Config, Train
from ddptrain.engine.out_of_memory import lack_of_memory

TORCHS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.25 GiB of which"
    " 1.19 GiB is free. If reserved but unallocated memory is large try setting something"
)
MODEL = "No batch size makes the model smaller: take a smaller one, or a device with more memory."
HALF = (
    "Put fewer samples through the model at once: train.micro_batch=16 (now 32); the global batch stays 64."
)


def raise_within(files: Sequence[str], text: str) -> None:
    """With frames of these modules in its traceback, the outermost first."""
    first, *rest = files
    line = "raise_within(rest, text)" if rest else "raise RuntimeError(text)"
    names = {"raise_within": raise_within, "rest": rest, "text": text}
    exec(compile(line, f"/x/ddptrain/{first}.py", "exec"), names)


@pytest.mark.parametrize(
    ("files", "changes", "said"),
    [
        (["engine/loop"], {}, HALF),
        (["engine/loop", "engine/opening"], {}, HALF),
        (["engine/loop", "data/resident"], {}, HALF),
        (["engine/loop"], {"micro_batch": 7}, "train.micro_batch=3 (now 7); the global batch stays 64."),
        (["engine/loop"], {"micro_batch": 1}, "is about half as much with precision=bf16."),
        (["engine/loop", "engine/update"], {}, MODEL),
        (["engine/loop", "engine/evaluate"], {}, "train.eval_batch_size=128 (now 256)."),
        (["engine/loop", "engine/evaluate"], {"eval_batch_size": 1}, MODEL),
        (["data/images", "data/resident"], {}, "data.resident=false."),
        (["engine/state"], {}, MODEL),
    ],
)
def test_the_override_that_fits(files: list[str], changes: dict[str, int], said: str) -> None:
    config = Config(train=Train(batch_size=64, **changes), precision="fp32")
    with pytest.raises(RuntimeError) as raised:
        raise_within(files, TORCHS)
    lack = lack_of_memory(raised.value, config, World(1, 2, 1, 2), "step 3, forward")
    assert lack is not None
    assert not lack.everywhere
    message = str(lack)
    assert message.startswith(
        "rank 1 at step 3, forward: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has"
    )
    assert message.endswith(said)
    assert "1.19 GiB is free. " in message
    assert "try setting" not in message, "what torch's caches might do helps few, and hides what helps most"


def test_with_bf16_already_only_a_smaller_model_is_left() -> None:
    config = Config(train=Train(batch_size=2), precision="bf16")
    with pytest.raises(RuntimeError) as raised:
        raise_within(["engine/loop"], "CUDA error: out of memory\nCompile with ...")
    lack = lack_of_memory(raised.value, config, World(0, 2, 0, 2), "step 0, forward")
    assert str(lack) == f"rank 0 at step 0, forward: CUDA error: out of memory. {MODEL}"


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not fit"), ValueError("out of memory"), KeyError("x")]
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    assert lack_of_memory(error, Config(), World(), "step 0, forward") is None
