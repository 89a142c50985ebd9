"""The verb ``checkpoint``, through the real command line."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from shell import ddptrain, early_refusal, refusal

from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.saved_checkpoint import read, unpack

TRAIN = "recipe=cnn_digits device=cpu model.width=8 train.steps=4 checkpoint.every=2 ema.decay=0.9"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of four steps, two checkpoints and the best."""
    folder = tmp_path_factory.mktemp("trained")
    ended = ddptrain(folder, f"{TRAIN} observers=[jsonl] run.dir=run checkpoint.background=true")
    assert ended.code == 0, ended.err
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(trained / "run", tmp_path / "run"))


def state_of(run: Path, name: str) -> dict[str, Any]:
    return unpack(read(run / "checkpoints" / name))


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


# -- verify ----------------------------------------------------------------------------------------


def test_verify_tells_of_each_checkpoint(trained: Path) -> None:
    done = ddptrain(trained, "checkpoint verify run=run")
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    assert [line[:3] for line in lines[:2]] == [["step-2", "step", "2"], ["step-4", "step", "4"]]
    assert lines[2][0] == "best"
    assert [line[-1] for line in lines] == ["ok"] * 3
    size = sum(file.stat().st_size for file in (trained / "run/checkpoints/step-4").iterdir())
    assert lines[1][3:5] == [f"{size:,}", "bytes"]


@pytest.mark.long
def test_verify_counts_what_is_damaged(run: Path) -> None:
    flip_a_bit(run / "checkpoints/step-4/state.pt")
    (run / "checkpoints/best/manifest.json").unlink()
    done = ddptrain(run.parent, "checkpoint verify run=run")
    assert done.code == 2
    good, flipped, incomplete = done.out.splitlines()
    assert good.endswith("ok")
    assert "state.pt does not match its SHA-256" in flipped
    assert "manifest.json is missing" in incomplete
    assert done.err.startswith("ddptrain: run=run: 2 of 3 checkpoints can't be used.")
    assert done.err.count("\n") == 1
    for name, code in (("last", 2), ("run/checkpoints/step-2", 0)):
        named = ddptrain(run.parent, f"checkpoint verify run=run checkpoint={name}")
        assert named.code == code, named
        assert named.out.count("\n") == 1


# -- show ------------------------------------------------------------------------------------------


def test_show_tells_what_is_in_it(trained: Path) -> None:
    done = ddptrain(trained, "checkpoint show run=run checkpoint=best")
    assert done.code == 0, done.err
    state, manifest = state_of(trained / "run", "best"), read(trained / "run/checkpoints/best").manifest
    head, table = done.out.split("\n\n")
    told = {line.split()[0]: line.split(maxsplit=1)[1] for line in head.splitlines() if " " in line.strip()}
    assert told["checkpoint"] == "run/checkpoints/best"
    assert told["config"] == "run/config.yaml"
    for name in ("step", "samples", "world_size", "seed", "batch_size", "train_size"):
        assert told[name] == str(manifest[name])
    assert f"accuracy {manifest['metrics']['accuracy']:.6g}" in told["metrics"]
    assert manifest["files"]["state.pt"]["sha256"] in told["state.pt"]
    for name, weights in (("weights", state["model"]), ("averaged", state["average"]["weights"])):
        every = torch.cat([tensor.flatten() for tensor in weights.values()]).double()
        assert told[name].startswith(f"{len(every):,} numbers in {len(weights)} tensors")
        assert float(told[name].split()[-1]) == pytest.approx(float(every.norm()), rel=1e-5)
    slots = [slot["exp_avg"].flatten() for slot in state["optimizer"]["state"].values()]
    assert (
        f"AdamW, trains 8 tensors, exp_avg 2-norm {float(torch.cat(slots).double().norm()):.6g}"
        in (told["optimizer"])
    )
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    assert rows.keys() == {"tensor", *state["model"]}
    weight = state["model"]["conv1.weight"]
    assert rows["conv1.weight"][:3] == ["8x1x3x3", "float32", f"{float(weight.double().norm()):.6g}"]


# -- convert ---------------------------------------------------------------------------------------

LOAD_PT = """
import sys
import torch
weights = torch.load(sys.argv[1], weights_only=True)
assert "ddptrain" not in sys.modules
assert type(weights) is dict
torch.save({name: float(tensor.double().sum()) for name, tensor in weights.items()}, sys.argv[2])
"""


@pytest.mark.long
def test_a_converted_file_is_read_without_ddptrain(trained: Path, tmp_path: Path) -> None:
    """The weights that evaluation uses, by an interpreter that knows nothing of us."""
    done = ddptrain(trained, f"checkpoint convert run=run out={tmp_path}/new/weights.pt")
    assert done.code == 0, done.err
    program = [sys.executable, "-I", "-c", LOAD_PT, tmp_path / "new/weights.pt", tmp_path / "sums"]
    subprocess.run(program, check=True, timeout=60)
    expected = state_of(trained / "run", "step-4")["average"]["weights"]
    assert torch.load(tmp_path / "sums") == {
        name: float(tensor.double().sum()) for name, tensor in expected.items()
    }
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["weights.pt"]


def test_safetensors_say_what_they_are(trained: Path, tmp_path: Path) -> None:
    target = tmp_path / "weights.safetensors"
    words = f"checkpoint=step-2 weights=model out={target}"
    done = ddptrain(trained, f"checkpoint convert run=run {words}")
    assert done.code == 0, done.err
    expected = state_of(trained / "run", "step-2")["model"]
    with safe_open(target, "pt") as file:
        facts = file.metadata()
        assert {name: facts[name] for name in ("step", "recipe", "weights")} == {
            "step": "2", "recipe": "cnn_digits", "weights": "model",
        }  # fmt: skip
        assert facts["ddptrain"]
        assert set(file.keys()) == set(expected)
        for name in file.keys():  # noqa: SIM118
            assert torch.equal(file.get_tensor(name), expected[name])


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A run of a recipe that is not here, with tied, channels_last, bool and scalar tensors."""
    run = tmp_path / "odd"
    run.mkdir()
    (run / "config.yaml").write_text("recipe: theirs\ntask: {_target_: nowhere.Task}\n")
    tied = torch.arange(12.0).reshape(3, 4)
    model = {
        "embedding.weight": tied,
        "head.weight": tied,
        "conv.weight": torch.rand(2, 3, 5, 5).to(memory_format=torch.channels_last),
        "mask": torch.tensor([True, False]),
        "norm.num_batches_tracked": torch.tensor(7),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "part": torch.rand(1000)[::2],
        "phase": torch.tensor([3 + 4j]),
    }
    Checkpointer(run / "checkpoints", 1).save({"model": model, "optimizer": {}, "step": 3}, {"step": 3})
    return run


@pytest.mark.long
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_any_tensor_is_converted_and_shown(odd: Path, suffix: str) -> None:
    """Also where the recipe's code and data are not there."""
    done = ddptrain(odd.parent, f"checkpoint convert run=odd out=weights.{suffix}")
    assert done.code == 0, done.err
    expected, target = state_of(odd, "step-3")["model"], odd.parent / f"weights.{suffix}"
    if suffix == "pt":
        loaded = torch.load(target)
    else:
        with safe_open(target, "pt") as file:
            loaded = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name
    if suffix == "pt":
        shown = ddptrain(odd.parent, "checkpoint show run=odd")
        assert shown.code == 0, shown.err
        assert "669 numbers in 8 tensors" in shown.out  # tied ones are counted once
        assert ["phase", "1", "complex64", "5"] in [line.split() for line in shown.out.splitlines()]


def test_what_exists_is_not_overwritten(trained: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious.pt"
    target.write_text("precious")
    message = refusal(trained, f"checkpoint convert run=run out={target}")
    assert message.startswith(f"out={target}: exists already")
    assert target.read_text() == "precious"


def test_a_target_that_can_not_be_written_is_named(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = refusal(trained, f"checkpoint convert run=run out={tmp_path}/file/weights.pt")
    assert message.startswith(f"out={tmp_path}/file/weights.pt: can't be written (")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("library", "words", "extra"),
    [
        ("safetensors", "checkpoint convert run=run out={}/weights.safetensors", "safetensors"),
        ("onnxruntime", "export run=run format=onnx out={}/model.onnx", "onnx"),
        ("onnxscript", "export run=run format=openvino out={}/model.xml", "openvino"),
    ],
)
def test_a_missing_library_is_named_with_its_installation(
    library: str, words: str, extra: str, trained: Path, tmp_path: Path
) -> None:
    line = words.format(tmp_path).split()
    program = (
        f"import sys; sys.modules['{library}'] = None; from ddptrain.verbs.main import main;"
        f"sys.exit(main({line}))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=trained, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert f"pip install 'ddptrain[{extra}]'" in ended.stderr
    assert words.startswith("checkpoint") or ended.stderr.startswith("ddptrain: export")  # before it loads
    assert not list(tmp_path.iterdir())


# -- what is asked ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", ["checkpoint: say what to do: checkpoint verify|show|convert run="]),
        ("run=run", ["checkpoint run=run: say what to do"]),
        ("verfy run=run", ["checkpoint verfy: say what to do", "Did you mean verify?"]),
        ("verify", ["checkpoint verify: name the run's folder: checkpoint verify run="]),
        ("verify run=nowhere", ["run=nowhere: there is no such folder."]),
        ("verify run=rum", ["run=rum: there is no such folder. Did you mean run?"]),
        ("show run=.", ["run=.: is no run's folder", "Did you mean run=run?"]),
        ("show run=run last", ["last: checkpoint show takes words of the form name=value only"]),
        ("show run=run optim.lr=1", ["optim.lr=1: checkpoint show takes words of the form"]),
    ],
)
def test_a_wrong_command_line_is_refused_at_once(trained: Path, words: str, said: list[str]) -> None:
    message = early_refusal(trained, f"checkpoint {words}")
    for part in said:
        assert part in message


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("convert run=run", "out: checkpoint convert needs it: out=..."),
        ("convert run=run out=weights.bin", "out=weights.bin: must end in .pt"),
        ("convert run=run out=w.pt weights=best", "weights=best: must be one of averaged, model"),
        (
            "show run=run checkpoit=best",
            "checkpoit: checkpoint show takes no such word. Did you mean checkp",
        ),
        ("show run=run checkpoint=step-3", "checkpoint=step-3: run has no such checkpoint"),
        ("verify run=empty", "run=empty: holds no checkpoint yet"),
        ("show run=empty", "run=empty: holds no checkpoint yet"),
        (
            "convert run=odd out=w.pt weights=averaged",
            "weights=averaged: odd/checkpoints/step-3 was saved",
        ),
    ],
)
def test_what_is_asked_is_checked(trained: Path, odd: Path, tmp_path: Path, words: str, said: str) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    (tmp_path / "empty").mkdir()
    shutil.copy(tmp_path / "run/config.yaml", tmp_path / "empty")
    assert said in refusal(tmp_path, f"checkpoint {words}")


def test_under_torchrun_the_first_rank_does_it(trained: Path) -> None:
    ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for rank, lines in (("0", 3), ("1", 0)):
        done = ddptrain(trained, "checkpoint verify run=run", RANK=rank, LOCAL_RANK=rank, **ranks)
        assert done.code == 0
        assert done.out.count("\n") == lines


def test_a_damaged_checkpoint_is_neither_shown_nor_converted(run: Path) -> None:
    flip_a_bit(run / "checkpoints/best/state.pt")
    for words in ("show", "convert out=weights.pt"):
        action, *rest = words.split()
        line = " ".join(["checkpoint", action, "run=run", "checkpoint=best", *rest])
        assert "state.pt does not match its SHA-256" in refusal(run.parent, line)
    assert not (run.parent / "weights.pt").exists()
