"""``ddptrain.fit``: a program's own objects, trained on ranks; and the same program by ``--script``."""

import copy
import json
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from marked import MARK, living
from shell import ddptrain as command_line
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torchmetrics.classification import BinaryAccuracy, MulticlassF1Score

import ddptrain
from ddptrain.api.rng import state_of_generators
from ddptrain.errors import UserError
from ddptrain.python.objects import objects_of

PROGRAM = """
import os
import sys

import ddptrain
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)


class Points(Dataset):
    '''Noisy points, whose class is the sign of the first coordinate.'''

    def __init__(self, count, seed):
        self.x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
        self.scaled = lambda x: 2 * x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.scaled(self.x[i]) + 0.1 * torch.randn(6), (self.x[i, 0] > 0).long()


def accuracy(output, target):
    return (output.argmax(1) == target).float()


net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
before = [p.clone() for p in net.parameters()]
run = ddptrain.fit(
    net,
    DataLoader(Points(120, 1), batch_size=20, shuffle=True, num_workers=WORKERS),
    Points(50, 2),
    "device=cpu", "log.every=2", "checkpoint.every=4", "task.higher_is_better=true", *sys.argv[1:],
    loss=nn.CrossEntropyLoss(),
    metrics={"accuracy": accuracy},
    best="accuracy",
    epochs=2,
    lr=1e-2,
    ranks=RANKS,
    run_dir="run",
)
assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
if os.environ.get("RANK", "0") == "0":
    total = sum(float(p.double().sum()) for p in run.model.parameters())
    print("RESULT", run.outcome, run.step, run.metrics["accuracy"], len(run.curves), total, flush=True)
"""
"""Without a main guard, with a class and a lambda of the program's own in loader processes."""


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a loader process takes a core from the trainer's threads, whose number decides on the rounding.
    Under torchrun a 1 is nobody's choice."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")


def program(folder: Path, ranks: int | None = None, workers: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "mine.py"
    file.write_text(PROGRAM.replace("RANKS", repr(ranks)).replace("WORKERS", repr(workers)))
    return file


def started(file: Path, *words: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *launcher, file.name, *words],
        cwd=file.parent,
        capture_output=True,
        text=True,
        timeout=200,
    )


def result(ended: subprocess.CompletedProcess[str]) -> list[str]:
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("RESULT"))
    return line.split()[1:]


def losses_of(run: Path) -> list[float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["split"] == "train"]


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.long
def test_a_program_on_its_own_ranks_under_torchrun_and_by_its_name(tmp_path: Path) -> None:
    """The same losses, and the same end, where the batches are the same; a call that is repeated goes on."""
    one = program(tmp_path / "one", workers=1)
    alone = result(started(one))
    assert alone[:2] == ["done", "12"]
    assert result(started(one)) == alone, "a finished run is returned"

    # by its name: first in part, then to the end, with the bits of the whole
    parts = program(tmp_path / "parts")
    begun = command_line(parts.parent, "--script=mine.py train.steps=6")
    assert begun.code == 0, begun.err
    assert result(started(parts)) == alone

    two = program(tmp_path / "two", ranks=2)
    own = result(started(two))
    torchrun = program(tmp_path / "torchrun", workers=1)
    assert result(started(torchrun, launcher=TORCHRUN)) == own
    assert losses_of(torchrun.parent / "run") == losses_of(two.parent / "run")

    record = (two.parent / "run/command.txt").read_text()
    assert "--script=mine.py" in record
    evaluated = command_line(two.parent, "evaluate run=run --script=mine.py checkpoint=last")
    assert evaluated.code == 0, evaluated.err
    assert f'"accuracy": {own[2]}' in evaluated.out
    again = [*TORCHRUN, "-m", "ddptrain", "--script=mine.py", "run.dir=again", "recipe=fit"]
    ended = subprocess.run(
        [sys.executable, *again], cwd=two.parent, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    assert losses_of(two.parent / "again") == losses_of(two.parent / "run")
    read = ddptrain.load(two.parent / "run", f"--script={two}").module
    assert sum(float(p.double().sum()) for p in read.parameters()) == float(own[4])
    unknown = command_line(two.parent, "evaluate run=run")
    assert unknown.code == 2
    assert "--script=<file>.py" in unknown.err


TWO_TRAININGS = """
import ddptrain, torch
torch.manual_seed(0)
for width in (1, 2):
    x = torch.randn(40, 3)  # the second time, after a training
    net, loss, words = torch.nn.Linear(3, width), torch.nn.MSELoss(), ["device=cpu"]
    words += ["deterministic=true", "debug.sync=true"] * (width == 1)
    run = ddptrain.fit(net, (x, x[:, :width]), None, *words, loss=loss, batch_size=8, epochs=width)
    assert not torch.are_deterministic_algorithms_enabled() and not torch.is_anomaly_enabled()
    print(f"RESULT {run.folder.name} {run.step} {float(x.sum())}\\n", end="", flush=True)  # at once
"""


@pytest.mark.long
def test_two_trainings_of_one_program_under_torchrun_are_two_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TWO_TRAININGS)
    ended = started(tmp_path / "mine.py", launcher=TORCHRUN)
    assert ended.returncode == 0, ended.stderr
    said = [tuple(line.split()[1:]) for line in ended.stdout.splitlines() if line.startswith("RESULT")]
    (one, steps, _), (other, more, _) = sorted(set(said), key=lambda run: int(run[1]))  # alike on both ranks
    assert len(said) == 4
    assert one != other
    assert int(more) > int(steps)


@pytest.mark.long
def test_a_job_of_torchrun_without_an_id_is_another_one_each_time(tmp_path: Path) -> None:
    """torchrun calls it ``none`` where --master-port is given; up to torch 2.11 it always does."""
    (tmp_path / "mine.py").write_text(TWO_TRAININGS)
    rendezvous = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=none")
    for runs in (2, 4):
        ended = started(tmp_path / "mine.py", launcher=(*TORCHRUN[:2], *rendezvous, TORCHRUN[-1]))
        assert ended.returncode == 0, ended.stderr
        assert len(list((tmp_path / "runs" / "fit").iterdir())) == runs


OTHER_SETS = {
    "tensors": "x = torch.randn(40, 3, generator=draw)\ntrain = valid = x, x",
    "a random split": """
class Inputs:
    def __len__(self):
        return 80
    def __getitem__(self, i):
        return torch.full((3,), float(i)), torch.zeros(3)
train, valid = torch.utils.data.random_split(Inputs(), [40, 40], generator=draw)""",
}


@pytest.mark.parametrize(
    "given", [pytest.param(given, marks=[pytest.mark.long] * (given != "tensors")) for given in OTHER_SETS]
)
def test_ranks_that_make_other_sets_are_refused(given: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"""
import ddptrain, os, torch
draw = torch.Generator().manual_seed(int(os.environ["RANK"]))
{OTHER_SETS[given]}
loss = torch.nn.MSELoss()
ddptrain.fit(torch.nn.Linear(3, 3), train, valid, "device=cpu", loss=loss, batch_size=8, epochs=1)
""")
    ended = started(tmp_path / "mine.py", launcher=TORCHRUN)
    assert ended.returncode == 1
    assert ended.stderr.count("ddptrain: ") == 1
    assert "data: rank 1 sees other samples than rank 0" in ended.stderr


@pytest.mark.long
def test_a_rank_that_is_refused_ends_torchrun_with_one_message(tmp_path: Path) -> None:
    ended = started(program(tmp_path), "train.batch_size=0", launcher=TORCHRUN)
    assert ended.returncode == 1  # torchrun's own
    assert "exitcode  : 2" in ended.stderr
    assert ended.stderr.count("train.batch_size=0") == 1
    other = started(program(tmp_path, ranks=3), launcher=TORCHRUN)
    assert "ranks=3: torchrun has started 2 already" in other.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [("print(1)", "it never does"), ("import nowhere", "No module named 'nowhere'")],
)
def test_a_program_that_never_calls_fit(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(content)
    ended = command_line(tmp_path, "--script=mine.py")
    assert ended.code == 2
    assert said in ended.err


X, Y = torch.randn(20, 3), torch.randint(2, (20,))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


class Locked(Dataset[Any]):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return X[index], Y[index]


def net() -> nn.Module:
    return nn.Linear(3, 2)


def worst(output: Tensor, target: Tensor) -> Tensor:
    """Of the batch: no mean."""
    return nn.functional.cross_entropy(output, target, reduction="none").max()


def spread(output: Tensor, target: Tensor) -> Tensor:
    """Compares the samples with each other; infinite for one."""
    return ((output - target) ** 2).sum() / ((target - target.mean(0)) ** 2).sum()


LOSS = nn.CrossEntropyLoss()
PAIRS = TensorDataset(X, Y)
WRONG: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    (("net", (X, Y)), {"loss": LOSS}, "model='net': must be a torch.nn.Module"),
    ((nn.Identity(), (X, Y)), {"loss": LOSS}, "Identity has no parameters"),
    ((nn.LazyLinear(2), (X, Y)), {"loss": LOSS}, "has no shape yet"),
    ((nn.Linear(3, 2, device="meta"), (X, Y)), {"loss": LOSS}, "weight is on meta"),
    ((nn.DataParallel(net()), (X, Y)), {"loss": LOSS}, "wrapped in DataParallel already"),
    ((torch.compile(net()), (X, Y)), {"loss": LOSS}, "is compiled already"),
    ((net(), X), {"loss": LOSS}, "train: one tensor"),
    ((net(), (X, Y[:5])), {"loss": LOSS}, "all need as many rows"),
    ((net(), (X, torch.tensor(1))), {"loss": LOSS}, "has no dimension"),
    ((net(), (X, Y), (X,)), {"loss": LOSS}, "valid: 1 tensors, and train has 2"),
    ((net(), (X, Y), [1, 2]), {"loss": LOSS}, "must be of the kind of train"),
    ((net(), (X.to("meta"), Y)), {"loss": LOSS}, "a tensor is on meta"),
    ((net(), Stream()), {"loss": LOSS}, "is not map-style"),
    ((net(), DataLoader(Stream())), {"loss": LOSS}, "is not map-style"),
    ((net(), {"train": PAIRS}), {"loss": LOSS}, "has names (train)"),
    (
        (net(), DataLoader(PAIRS, sampler=WeightedRandomSampler([1.0] * 20, 20))),
        {"loss": LOSS},
        "a DataLoader with WeightedRandomSampler",
    ),
    ((net(), DataLoader(PAIRS, batch_size=None)), {"loss": LOSS}, "makes its own batches"),
    ((net(), DataLoader(PAIRS, batch_sampler=[[1, 2], [3]])), {"loss": LOSS}, "with list makes its own"),
    ((net(), Locked()), {"loss": LOSS}, "train: can't be sent"),
    ((net(), (X, Y)), {"loss": LOSS, "ranks": 0}, "ranks=0: must be 1 or more"),
    ((net(), (X, Y)), {}, "give one of them"),
    ((net(), (X, Y)), {"loss": LOSS, "optimizer": "adamm"}, "adamm"),
    ((net(), (X, Y)), {"loss": LOSS, "batch_size": 0}, "train.batch_size=0"),
    ((net(), (X, Y)), {"loss": LOSS, "best": "f1"}, "task.best_metric=f1"),
    ((net(), (X, Y), None, "lerning=1"), {"loss": LOSS}, "lerning"),
    ((net(), (X, Y)), {"loss": LOSS, "device": "cpu"}, 'fit(model, train, None, "device=cpu", ...)'),
    ((net(), (X, Y)), {"loss": LOSS, "batchsize": 8}, "Did you mean batch_size?"),
    ((net(), (X, Y)), {"loss": LOSS, "epochs": 1, "optimizer": "adamW"}, "Did you mean adamw?"),
    ((net(), {"x": X, "y": Y}), {"loss": LOSS}, "or of tensors a tuple: (x, y)"),
    ((net(), (X, Y)), {"loss": LOSS, "valdi": (X, Y)}, "valdi: is no argument of fit. Did you mean valid?"),
    ((net(), (X, Y), None, "--cfg=job"), {"loss": LOSS}, "--cfg=job: from Python"),
    ((net(), (X, Y.float())), {"loss": nn.MSELoss()}, "MSELoss refuses the model's output"),
    ((net(), (X, Y + 1)), {"loss": LOSS}, "has 2 classes, so targets are from 0 to 1."),
    ((lambda: None, (X, Y)), {"loss": LOSS}, "makes NoneType"),
    ((net(), "strategy=ddp", (X, Y)), {"loss": LOSS}, "words follow the model and the data"),
    ((net(), Locked), {"loss": LOSS}, "is not map-style"),
    ((net(), [(X[: 1 + i % 2], 0) for i in range(20)]), {"loss": LOSS}, "a DataLoader's collate_fn"),
    ((net(), (X, Y)), {"loss": nn.CrossEntropyLoss}, "CrossEntropyLoss is a class; make one"),
    ((net(), (X, Y)), {"loss": nn.Linear(2, 1)}, "Make it a part of the model"),
    ((net(), (X, Y)), {"loss": lambda output, target: 0.5}, "returned float for"),
    ((net(), (X, Y)), {"loss": lambda output, target: torch.ones(3)}, "returned a tensor of shape (3,) for"),
    ((net(), (X, Y)), {"loss": lambda output, target: output.detach().sum(1)}, "has no graph"),
    ((net(), (X, Y)), {"loss": lambda output, target: (output @ output.T).sum()}, "neither their mean nor"),
    ((net(), (X, Y + 5)), {"loss": LOSS}, "Target"),
    ((net(), (X, Y)), {"loss": LOSS, "optimizer": torch.optim.SGD(net().parameters())}, "give a name"),
    ((net(), (X, Y)), {"loss": LOSS, "metrics": {"f1": MulticlassF1Score}}, "made with its arguments"),
    ((net(), (X, Y)), {"loss": LOSS, "metrics": [MulticlassF1Score(2)]}, "metrics: need names; give a dict"),
    ((nn.Linear, (X, Y)), {"loss": LOSS}, "Linear needs arguments (in_features, out_features). Give the"),
    ((lambda depth: net(), (X, Y)), {"loss": LOSS}, "<lambda> needs arguments (depth)."),
    ((net(), (X, Y)), {"loss": LOSS, "metrics": {"f1": MulticlassF1Score(2).to("meta")}}, "is on meta"),
    ((net(), (X, Y)), {"loss": LOSS, "metrics": {"a": BinaryAccuracy()}}, "BinaryAccuracy refuses a batch"),
    ((net(), (X, Y)), {"loss": LOSS, "metrics": {"loss": LOSS}}, "is the name of the loss"),
    ((net(), (X, Y)), {"loss": LOSS, "metrics": {"worst": worst}}, "metrics.worst: is"),
    ((net(), (X, Y)), {"loss": LOSS, "metrics": {"a": lambda o, t: "x"}}, "metrics.a: returned str; it must"),
    (
        (net(), (X, Y)),
        {"loss": LOSS, "metrics": {"f1": MulticlassF1Score(2)}, "best": "F2"},
        "there are loss, f1",
    ),
    ((net(), (X, X[:, :2])), {"loss": spread}, "inf, inf, inf, inf for each of them"),
    ((net(), (X, Y)), {"loss": LOSS, "batch_size": 1, "ranks": 2}, "must give each of the 2 ranks a sample"),
    ((net(), (X, Y)), {"step": lambda model, batch: None}, "step: returned NoneType"),
]


@pytest.mark.parametrize(
    "wrong",
    # those with ranks start processes: a few of them are enough here
    [pytest.param(i, marks=[pytest.mark.long] * (i >= 45 and i % 4 > 0)) for i in range(len(WRONG))],
)
def test_wrong_calls(wrong: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message, which says the way out."""
    monkeypatch.chdir(tmp_path)
    arguments, named, said = WRONG[wrong]
    words = ("device=cpu",) if len(arguments) > 2 else (None, "device=cpu")
    with pytest.raises(UserError) as error:
        ddptrain.fit(*arguments, *words, **{"epochs": 1, **named})
    assert said in str(error.value)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_error_in_the_model_is_named_without_the_traceback(tmp_path: Path, ranks: int) -> None:
    """That is in the log."""
    said = r"^the training has failed, with exit code 1:\n(\[rank\d\]: )?RuntimeError: mat1 and mat2 shapes"
    with pytest.raises(RuntimeError, match=said):
        ddptrain.fit(
            nn.Linear(4, 3), (torch.zeros(64, 5), torch.zeros(64).long()), None, "device=cpu",
            loss=nn.CrossEntropyLoss(), epochs=1, run_dir=tmp_path / "run", ranks=ranks,
        )  # fmt: skip


def test_no_process_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "fit")
    monkeypatch.chdir(tmp_path)
    run = ddptrain.fit(net(), (X, Y), "device=cpu", loss=LOSS, batch_size=10, epochs=1, ranks=2)
    assert living("fit") == {}
    assert json.loads((run.folder / "summary.json").read_text())["outcome"] == "done"
    assert not run.model.training


def test_checkpoints_that_are_loaded_stand_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else of the program is changed by it."""
    monkeypatch.chdir(tmp_path)
    words = ("device=cpu", "checkpoint.every=2", "checkpoint.keep=2", "train.steps=4")
    run = ddptrain.fit(net(), (X, Y), None, *words, loss=nn.CrossEntropyLoss(), lr=0.1)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = state_of_generators()
    early = ddptrain.load(run, checkpoint="step-2").module
    weights = copy.deepcopy(early.state_dict())
    late = ddptrain.load(run, checkpoint="step-4").module
    assert state_of_generators() == before
    assert all(torch.equal(weights[name], value) for name, value in early.state_dict().items())
    assert not all(torch.equal(weights[name], value) for name, value in late.state_dict().items())
    late.double()
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}


class Shifted(TensorDataset):
    """Gives other samples than the tensors that it holds."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return x, y + 100


@pytest.mark.long
def test_a_dataset_that_holds_tensors_may_change_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: dict[str, Any] = {"loss": nn.MSELoss(), "metrics": {"target": lambda _, target: target[:, 0]}}
    for name, kind in (("plain", TensorDataset), ("shifted", Shifted)):
        given = kind(X, X[:, :1])
        run = ddptrain.fit(nn.Linear(3, 1), given, given, "device=cpu", **asked, epochs=1, run_dir=name)
        assert (run.metrics["target"] > 50) == (name == "shifted")


@pytest.mark.long
def test_tensors_have_names_of_classes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    labels = (X[:, 0] > 0).long()
    model = nn.Linear(X.shape[1], 2)
    words = ("device=cpu", "data.classes=[cat,dog]")
    f1 = MulticlassF1Score(num_classes=2, average=None)
    run = ddptrain.fit(model, (X, labels), None, *words, loss=nn.CrossEntropyLoss(), epochs=1, metrics=f1)
    assert {"multiclassf1score/cat", "multiclassf1score/dog"} <= run.metrics.keys()
    assert ddptrain.load(run).classes == ("cat", "dog")


@pytest.mark.long
def test_words_name_classes_of_packages_that_are_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed/theirs.py").write_text("import torch\nclass Plain(torch.optim.SGD): pass")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"))
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.chdir(tmp_path)
    words = ["optim=sgd", "optim._target_=theirs.Plain", "device=cpu"]
    asked: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "epochs": 1, "lr": 0.1, "run_dir": "r"}
    with pytest.raises(UserError, match=r"theirs\.Plain"):
        ddptrain.fit(net(), (X, Y), None, *words, **asked)
    run = ddptrain.fit(net(), (X, Y), None, *words, **asked, trust=["theirs"])
    assert run.outcome == "done"
    assert "--trust=theirs" in (run.folder / "command.txt").read_text()
    assert not run.model.training
    assert not ddptrain.load(run).module.training
    assert "Plain" in capfd.readouterr().out
    with pytest.raises(UserError, match="nowhere: is not installed"):
        ddptrain.fit(net(), (X, Y), None, **asked, trust=["nowhere"])


@pytest.mark.long
def test_a_sweep_of_what_a_program_gives(tmp_path: Path) -> None:
    program(tmp_path)
    ended = command_line(tmp_path, "--multirun --script=mine.py optim.lr=0.01,0.001 train.steps=4")
    assert ended.code == 0, ended.err
    assert "2 jobs: 2 done" in ended.out
    losses = [losses_of(folder.parent) for folder in sorted(tmp_path.glob("sweeps/fit/*/metrics.jsonl"))]
    assert len(losses) == 2
    assert losses[0] != losses[1]


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return X[index], Y[index].float().reshape(1)


def hundred_more(samples: list[Any]) -> Any:
    inputs, targets = default_collate(samples)
    return inputs, targets + 100


@pytest.mark.long
def test_each_loaders_own_collate_and_a_folder_of_any_name(tmp_path: Path) -> None:
    """As cutmix in the training's alone; a name that Hydra's grammar would read otherwise."""
    folder = tmp_path / "2024_11 lr=0.1, (é) #1"
    run = ddptrain.fit(
        nn.Linear(3, 1), DataLoader(Pairs(), batch_size=10, collate_fn=hundred_more),
        DataLoader(Pairs(), batch_size=10), "device=cpu", "data.workers=0", "observers=[console,jsonl]",
        loss=nn.MSELoss(), metrics={"target": lambda _, target: target}, best="loss", epochs=1,
        run_dir=folder,
    )  # fmt: skip
    assert run.folder == folder
    assert run.metrics["target"] <= 1
    assert run.curves.points("loss", "train")[1][0] > 5000
    shutil.copytree(run.checkpoints["best"], folder / "checkpoints/step-1-copy")  # the user's own
    (folder / "checkpoints/step-9").mkdir()  # is being written
    assert list(ddptrain.Run(folder).checkpoints) == ["step-2", "best"]
    shutil.rmtree(folder / "checkpoints/best")
    assert ddptrain.Run(folder).best == {}


def test_a_loader_with_a_distributed_sampler_names_one_ranks_batch_size() -> None:
    sampler = DistributedSampler(PAIRS, num_replicas=4, rank=1)
    _, settings = objects_of(net(), DataLoader(PAIRS, batch_size=16, sampler=sampler), None, LOSS, None, None)
    assert settings["train.batch_size"] == 64
