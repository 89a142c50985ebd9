"""Weights that a new run starts from: read from wherever they are, matched by name and size."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from shell import ddptrain, refusal
from torch import nn

from ddptrain.api.world import World
from ddptrain.errors import UserError
from ddptrain.run.initial_weights import match, read_weights

RUN = (
    "recipe=mobilenet_cifar10 data=shapes data.source.train=80 data.source.valid=20 device=cpu"
    " train.batch_size=20 train.steps=4 ema.decay=0.9 observers=[]"
)


def small(classes: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 40, 3), nn.BatchNorm2d(40), nn.Flatten(), nn.Linear(40, classes))


def wrapped(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {prefix + name: value for name, value in state.items()}


WRAPPINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "as it is": lambda state: state,
    "DDP": lambda state: wrapped(state, "module."),
    "Lightning": lambda state: {"epoch": 3, "state_dict": wrapped(state, "model.")},
    "compiled, in DDP": lambda state: {"model": wrapped(state, "module._orig_mod.")},
    "torchvision's references": lambda state: {"model": state, "optimizer": {}, "epoch": 1},
}


@pytest.mark.parametrize("how", WRAPPINGS)
def test_a_file_is_understood_however_its_names_are_wrapped(how: str, tmp_path: Path) -> None:
    theirs, model = small(), small()
    torch.save(WRAPPINGS[how](theirs.state_dict()), tmp_path / "w.pth")
    found = match(model, read_weights(str(tmp_path / "w.pth"), {}, World()).tensors, "w.pth", [])
    assert found.loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in found.loaded.items())
    assert found.share == 1


def test_a_head_of_another_size_is_left_out_and_said_so(tmp_path: Path) -> None:
    save_file(small(7).state_dict(), tmp_path / "w.safetensors")
    found = match(small(), read_weights(str(tmp_path / "w.safetensors"), {}, World()).tensors, "w", [])
    assert found.other_size == [
        "3.weight (7, 40) there, (5, 40) here",
        "3.bias (7,) there, (5,) here",
    ]
    assert "2 left out, of another size, so random: 3.weight (7, 40) there" in "\n".join(found.lines())


def test_what_is_skipped_stays_random(tmp_path: Path) -> None:
    found = match(small(), small().state_dict(), "w", ["3.*"])
    assert found.skipped == ["3.weight", "3.bias"]
    assert not {"3.weight", "3.bias"} & found.loaded.keys()
    with pytest.raises(UserError, match=r"^init\.skip=head\.\*: matches no name; there are 0\.weight"):
        match(small(), small().state_dict(), "w", ["head.*"])


def test_another_models_file_is_refused() -> None:
    with pytest.raises(UserError, match=r"^init\.weights=w: fits only 0\.0% of the model"):
        match(small(), {"layer.weight": torch.ones(3)}, "w", [])


def no_such(folder: Path) -> str:
    return "w.pt"


def broken(folder: Path) -> str:
    (folder / "w.pt").write_bytes(b"PK\x03\x04 no more than this")
    return "w.pt"


def pickled_model(folder: Path) -> str:
    torch.save(small(), folder / "w.pt")
    return "w.pt"


def no_weights(folder: Path) -> str:
    torch.save({"epoch": 3}, folder / "w.pt")
    return "w.pt"


def broken_safetensors(folder: Path) -> str:
    (folder / "w.safetensors").write_bytes(b"\xff" * 20)
    return "w.safetensors"


def empty_folder(folder: Path) -> str:
    (folder / "w").mkdir()
    return "w"


def run_without_checkpoint(folder: Path) -> str:
    (folder / "w" / "checkpoints").mkdir(parents=True)
    return "w"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (no_such, "does not exist"),
        (broken, "can't be read as weights"),
        (pickled_model, "holds more than tensors"),
        (no_weights, "holds no weights"),
        (broken_safetensors, "can't be read as weights"),
        (empty_folder, "is neither a run's folder nor a checkpoint's"),
        (run_without_checkpoint, "holds no checkpoint yet"),
    ],
)
def test_what_can_not_be_read_is_named(make: Callable[[Path], str], said: str, tmp_path: Path) -> None:
    source = str(tmp_path / make(tmp_path))
    with pytest.raises(UserError) as raised:
        read_weights(source, {}, World())
    assert source in str(raised.value)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("source", "model", "said"),
    [
        ("torchvision:DEFAULT", {"_target_": "x"}, "is for model=torchvision"),
        ("torchvision:BEST", {"name": "resnet18"}, "there are IMAGENET1K_V1"),
    ],
)
def test_a_librarys_weights_need_its_model(source: str, model: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_weights(source, model, World())


@pytest.mark.long
def test_a_run_starts_from_another_and_then_needs_it_no_more(tmp_path: Path) -> None:
    """Frozen parts equal the first run's to the bit, on two ranks, with accumulation and an average."""
    assert ddptrain(tmp_path, f"{RUN} run.dir=one").code == 0
    words = f"{RUN} run.dir=two init.weights=one freeze=[features.0.*] train.micro_batch=5"
    ended = ddptrain(tmp_path, f"launch --nproc-per-node=2 {words}")
    assert ended.code == 0, ended.stderr
    assert "weights    init.weights=one:" in ended.out + ended.err
    states = [
        torch.load(tmp_path / run / "checkpoints" / "best" / "state.pt", weights_only=True)
        for run in ("one", "two")
    ]
    frozen = {name: value for name, value in states[0]["average"]["weights"].items() if "features.0." in name}
    assert {name.rpartition(".")[2] for name in frozen} >= {"weight", "running_mean"}
    for name, value in frozen.items():
        assert torch.equal(value, states[1]["model"][name])
        assert torch.equal(value, states[1]["average"]["weights"][name])
    last = "classifier.3.weight"
    assert not torch.equal(states[0]["average"]["weights"][last], states[1]["model"][last])
    (tmp_path / "one").rename(tmp_path / "gone")
    again = words.replace("train.steps=4", "train.steps=6")
    assert ddptrain(tmp_path, f"launch --nproc-per-node=2 {again}").code == 0
    message = refusal(tmp_path, f"{again} freeze=[]")
    assert message.startswith("freeze, thaw, optim.groups, optim.layer_decay or train.weight_decay_on: ")
