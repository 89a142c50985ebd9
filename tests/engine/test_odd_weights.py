"""Files of weights of every kind: what ``init.weights`` takes has the values that are in the file, and what
it does not take is named, with what it is and what to do."""

import random
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ddptrain.api.world import World
from ddptrain.errors import UserError
from ddptrain.run.initial_weights import load_initial_weights

State = dict[str, Any]
WHOLE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.bool)
REAL = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SCALED = (torch.float8_e4m3fn, torch.float8_e5m2)
COMPLEX = (torch.complex64, torch.complex128)


class Every(nn.Module):
    """A parameter or buffer of every kind that a model has."""

    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Parameter(torch.randn(4, 3))
        self.turned = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.norm = nn.BatchNorm1d(64)
        for name, dtype in (("seen", torch.int32), ("used", torch.bool)):
            self.register_buffer(name, torch.zeros(4, 3, dtype=dtype))


TENSORS = ("real", "turned", "seen", "used")


def plain(dtype: torch.dtype) -> Tensor:
    return torch.tensor([[1, 0, 0], [0, 1, 1], [1, 1, 0], [0, 0, 1]]).to(dtype)


KINDS: dict[str, Callable[[], Tensor]] = {
    **{str(dtype): lambda dtype=dtype: plain(dtype) for dtype in (*WHOLE, *REAL, *SCALED, *COMPLEX)},  # type: ignore[misc]
    "sparse_coo": lambda: plain(torch.float32).to_sparse(),
    "sparse_csr": lambda: plain(torch.float32).to_sparse_csr(),
    "torch.qint8": lambda: torch.quantize_per_tensor(plain(torch.float32), 0.1, 0, torch.qint8),
    "meta": lambda: plain(torch.float32).to("meta"),
    "beyond int32": lambda: plain(torch.int64) * 2**40,
    "empty": lambda: torch.empty(0),
    "0-d": lambda: torch.tensor(1.0),
    "turned over": lambda: plain(torch.float32).T.contiguous(),
    "a view": lambda: torch.stack([plain(torch.float32)] * 2, dim=2)[..., 1],
}
OTHER_SIZE = ("empty", "0-d", "turned over")
OF_TORCH_ALONE = ("sparse_coo", "sparse_csr", "torch.qint8", "meta")
"""safetensors writes none of them, nor complex128."""


def under(name: str) -> Callable[[State], State]:
    return lambda state: {"epoch": 3, "best_acc1": torch.tensor(0.5), name: state, "real": torch.zeros(4, 3)}


def after(prefix: str) -> Callable[[State], State]:
    return lambda state: {prefix + name: value for name, value in state.items()}


CONTAINERS: dict[str, Callable[[State], State]] = {
    "as it is": lambda state: state,
    **{name: under(name) for name in ("state_dict", "model_state_dict", "model", "weights", "params")},
    "model, state_dict": lambda state: {"model": {"epoch": 1, "state_dict": state}, "lr": torch.ones(2)},
    "average": lambda state: {"average": {"weights": state}, "model": {"real": torch.zeros(4, 3)}},
    **{prefix: after(prefix) for prefix in ("module.", "_orig_mod.", "module._orig_mod.", "model.module.")},
    "imagenet": lambda state: under("state_dict")(after("module.")(state)),
}


def formats(kind: str) -> Iterator[str]:
    yield "zip"
    if kind not in ("torch.uint16", *map(str, SCALED)):  # younger than that format
        yield "legacy"
    if kind not in (*OF_TORCH_ALONE, "torch.complex128"):
        yield "safetensors"


def write(state: State, container: str, form: str, folder: Path) -> Path:
    file = folder / ("w.safetensors" if form == "safetensors" else "w.pt")
    held = CONTAINERS[container](state)
    if form == "safetensors":
        save_file({name: value.contiguous() for name, value in held.items()}, file)
    else:
        torch.save(held, file, _use_new_zipfile_serialization=form == "zip")
    return file


def load(file: Path, model: nn.Module) -> None:
    load_initial_weights(str(file), [], {}, model, World())


def refused(kind: str, given: Tensor, own: Tensor) -> str | None:
    """What is said of a tensor, by a list; None where it is taken."""
    taken = REAL if own.is_floating_point() else COMPLEX if own.is_complex() else WHOLE
    if kind == "meta":
        return "has no values"
    if kind in OF_TORCH_ALONE:
        return f"({kind.removeprefix('torch.')})"
    if kind == "beyond int32" and taken == WHOLE:
        return f"has values that {str(own.dtype).removeprefix('torch.')} can't hold"
    if given.dtype in taken:
        return None
    return f"is {given.dtype}, and the model's is {own.dtype}".replace("torch.", "")


@pytest.mark.parametrize("container", CONTAINERS)
def test_what_is_loaded_is_what_the_file_holds(container: str, tmp_path: Path) -> None:
    """Formats x kinds of tensor x the model's own kinds."""
    tried = 0
    for kind, tensor in product(KINDS, TENSORS):
        for form in formats(kind):
            if form == "safetensors" and not (container == "as it is" or container.endswith(".")):
                continue  # it holds tensors alone
            theirs, model = Every(), Every()
            given = KINDS[kind]()
            file = write({**theirs.state_dict(), tensor: given}, container, form, tmp_path)
            expected = theirs.state_dict()
            own = model.state_dict()[tensor].clone()
            what = f"{container}, {form}: {kind} for {tensor}, {own.dtype}"
            tried += 1
            if kind in OTHER_SIZE:
                expected[tensor] = own  # random, as the log says
                load(file, model)
            elif (said := refused(kind, given, own)) is None:
                expected[tensor] = torch.tensor(given.tolist(), dtype=own.dtype)
                load(file, model)
            else:
                expected = {name: value.clone() for name, value in model.state_dict().items()}
                with pytest.raises(UserError) as raised:
                    load(file, model)
                assert str(raised.value).startswith(f"init.weights={file}: {tensor} "), what
                assert said in str(raised.value), what
                assert "init.skip=[" in str(raised.value), what
            for name, value in model.state_dict().items():
                assert torch.equal(value, expected[name]), f"{what}: {name}"
    assert tried >= 180


@pytest.mark.parametrize("dtype", [*WHOLE, torch.float32])
def test_the_steps_that_a_batchnorm_has_seen_are_a_whole_number(dtype: torch.dtype, tmp_path: Path) -> None:
    theirs, model = Every(), Every()
    state = {**theirs.state_dict(), "norm.num_batches_tracked": torch.tensor(1).to(dtype)}
    torch.save(state, tmp_path / "w.pt")
    if dtype.is_floating_point:
        with pytest.raises(
            UserError, match=r"norm\.num_batches_tracked is float32, and the model's is int64"
        ):
            load(tmp_path / "w.pt", model)
    else:
        load(tmp_path / "w.pt", model)
        assert model.norm.num_batches_tracked is not None
        assert model.norm.num_batches_tracked.item() == 1


def test_another_precision_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = Every().state_dict()
    torch.save({**state, "real": state["real"].half()}, tmp_path / "w.pt")
    caplog.set_level("INFO", "ddptrain")
    load(tmp_path / "w.pt", Every())
    assert "of another precision, cast: real float16 there, float32 here" in caplog.text


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
def test_a_damaged_file_is_named(form: str, tmp_path: Path) -> None:
    """Cut, or with other bytes: it is refused, or what it says is taken."""
    theirs, dice, said = Every(), random.Random(form), []
    file = write(theirs.state_dict(), "as it is", form, tmp_path)
    whole = file.read_bytes()
    for turn in range(200):
        damaged = bytearray(whole)
        if turn % 3 == 0:
            del damaged[dice.randrange(len(whole)) :]
        else:
            for _ in range(dice.choice((1, 3, 30))):
                damaged[dice.randrange(len(whole) if turn % 2 else 200)] = dice.randrange(256)
        file.write_bytes(damaged)
        try:
            load(file, Every())
        except UserError as error:
            said.append(str(error))
    assert len(said) > 70
    for message in said:
        assert message.startswith(f"init.weights={file}: ")
        assert "\n" not in message
        assert len(message) < 700
        assert " ()" not in message


def garbage(file: Path) -> None:
    file.write_bytes(bytes(range(7, 200)))


def circle(file: Path) -> None:
    held: State = {}
    held["model"] = held
    torch.save(held, file)


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda file: file.write_bytes(b""), "is empty (0 bytes)"),
    "a pointer": (lambda file: file.write_text("version https://git-lfs"), "is a text, and holds no weights"),
    "a page": (lambda file: file.write_text("<!DOCTYPE html>"), "it begins with '<!DOCTYPE html>'"),
    "a log": (lambda file: file.write_text("epoch 12\n"), "is a text"),
    "garbage": (garbage, "can't be read as weights: it is damaged, or torch.save has not written it"),
    "a model": (
        lambda file: torch.save(nn.Linear(2, 2), file),
        "more than tensors: torch.nn.modules.",
    ),
    "a tensor": (lambda file: torch.save(torch.ones(3), file), "holds no weights"),
    "no tensors": (lambda file: torch.save({"net": {}, "epoch": 3}, file), "it holds net, epoch"),
    "itself": (circle, "holds no weights"),
    "a folder": (lambda file: file.mkdir(), "is neither a run's folder nor a checkpoint's."),
}


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_what_is_no_file_of_weights_is_called_what_it_is(what: str, ending: str, tmp_path: Path) -> None:
    make, said = ODD[what]
    file = tmp_path / f"w{ending}"
    make(file)
    with pytest.raises(UserError) as raised:
        load(file, Every())
    assert str(raised.value).startswith(f"init.weights={file}: ")
    assert " ()" not in str(raised.value)
    if ending == ".pt" or what in ("empty", "a pointer", "a page", "a log", "a folder"):
        assert said in str(raised.value)


def test_a_folder_of_runs_says_which_there_are(tmp_path: Path) -> None:
    for run in ("finetune/one", "finetune/two", "early"):
        (tmp_path / "runs" / run / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError) as raised:
        load(tmp_path / "runs", Every())
    assert "is neither a run's folder nor a checkpoint's. Name one that it holds: " in str(raised.value)
    assert all(str(tmp_path / "runs" / run) in str(raised.value) for run in ("finetune/one", "finetune/two"))


def test_a_name_with_and_without_a_prefix_is_not_guessed(tmp_path: Path) -> None:
    """Of two tensors that would have one name, neither is put in the other's place."""
    theirs, model = Every(), Every()
    state = {**after("module.")(theirs.state_dict()), "real": torch.zeros(4, 3)}
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(UserError, match="fits only"):
        load(tmp_path / "w.pt", model)
