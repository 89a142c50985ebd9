"""What is said where a kernel on the GPU has met a value that it refuses."""

import pytest
from toy import auto

from ddptrain.api.world import World
from ddptrain.config.schema import Config
from ddptrain.run.setup import joined_world
from ddptrain.testing import run_ranks


@pytest.mark.parametrize(
    ("said", "noted"),
    [("CUDA error: device-side assert triggered", True), ("CUDA error: an illegal memory access", False)],
)
def test_a_device_side_assert_is_told_with_what_names_its_line(said: str, noted: bool) -> None:
    def rank(_: World) -> list[str]:
        try:
            with joined_world(Config(device="cpu", strategy=auto()), single=True):
                raise RuntimeError(said)
        except RuntimeError as error:
            return getattr(error, "__notes__", [])

    [notes] = run_ranks(rank, 1)
    assert any("debug.sync=true names the right one" in note for note in notes) == noted
