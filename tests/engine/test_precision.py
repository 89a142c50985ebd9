"""What a GPU is refused to compute in, and a CPU that lacks bf16."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from toy import CLASSES, FEATURES, Fit

from ddptrain.api.world import World
from ddptrain.engine.plan import Plan
from ddptrain.engine.precision import Precision, choose_precision
from ddptrain.errors import UserError

PLAN = Plan(steps=2, train_size=100, batch_size=24, log_every=1, seed=2)
GPU = torch.device("cuda", 0)
CONVOLVES = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ConvTranspose1d(2, 2, 1)))


@pytest.fixture
def of_2018(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of sm_75, which is not to be had here."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")


@pytest.mark.usefixtures("of_2018")
def test_convolutions_in_bf16_are_refused_where_cudnn_has_none() -> None:
    with pytest.raises(UserError, match=r"^precision=bf16: 1\.0 of the model is a convolution.*Tesla T4"):
        Precision("bf16", GPU).check(CONVOLVES)


@pytest.mark.usefixtures("of_2018")
def test_what_is_sound_is_let_through() -> None:
    Precision("bf16", GPU).check(nn.LSTM(2, 2))
    Precision("fp16", GPU).check(CONVOLVES)
    chosen = choose_precision("auto", GPU)
    chosen.check(CONVOLVES)
    assert chosen.name == "fp32"
    Precision("bf16", torch.device("cpu")).check(CONVOLVES)


class Turns(nn.Module):
    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.turn = nn.Parameter(torch.ones(CLASSES, dtype=kind))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return (self.layer(features) * self.turn).real


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (torch.complex64, r"turn of the model is complex64.* \(torch.view_as_real\), or use precision=bf16"),
        (torch.float16, r"turn of the model is float16.*Keep it as float32"),
    ],
)
def test_gradients_that_fp16s_scaler_does_not_take_are_refused_before_a_step(
    tmp_path: Path, kind: torch.dtype, said: str
) -> None:
    fit = Fit(PLAN, make_model=lambda: Turns(kind), precision="fp16")
    with pytest.raises(UserError, match=rf"^precision=fp16: {said}"):
        fit.run(World(), tmp_path)


def test_they_are_no_concern_where_they_are_not_trained_or_not_scaled() -> None:
    model = Turns(torch.complex64)
    Precision("bf16", torch.device("cpu")).check_gradients(model)
    model.turn.requires_grad = False
    Precision("fp16", torch.device("cpu")).check_gradients(model)


LSTM = """
import torch
from torch import nn
from ddptrain.engine.precision import Precision
lstm, precision = nn.LSTM(4, 8), Precision("bf16", torch.device("cpu"))
x = torch.randn(3, 2, 4)
for grad in (True, False):
    with torch.set_grad_enabled(grad):
        with precision.autocast():
            found, _ = lstm(x)
        if grad:
            found.sum().backward()
        print(float((found.float() - lstm(x)[0]).detach().abs().max()))
"""


@pytest.mark.parametrize("cpu", ["AVX2", "ALL"])
def test_a_cpu_without_bf16_has_lstms_in_float32(cpu: str) -> None:
    """oneDNN is told to take this CPU for an older one, or for what it is."""
    exact = cpu == "AVX2" or not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    done = subprocess.run(
        [sys.executable, "-c", LSTM], env={**os.environ, "ONEDNN_MAX_CPU_ISA": cpu},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for apart in map(float, done.stdout.split()):
        assert apart == 0 if exact else 0 < apart < 0.02
