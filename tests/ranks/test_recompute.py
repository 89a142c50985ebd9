"""Activations that are computed again (train.recompute): the same bits from less memory."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from memory import allocations, phase
from shell import ddptrain, refusal
from texts import write_text
from torch import Tensor, nn
from torchvision.models import resnet18
from toy import CLASSES, FEATURES, Fit, auto, newest_state, run_killed_at, strict

from ddptrain.api.world import World
from ddptrain.engine.flops import counter
from ddptrain.engine.parameter_groups import parameter_groups
from ddptrain.engine.plan import Plan
from ddptrain.engine.recompute import recompute
from ddptrain.errors import UserError
from ddptrain.observe.jsonl import Jsonl

PLAN = Plan(
    steps=8, train_size=100, batch_size=30, micro_batch=8, eval_every=4, save_every=2, log_every=2,
    clip_norm=1.0, seed=5,
)  # fmt: skip
PATTERNS = ["*_block", "norms.*", "noisy"]
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": auto(bucket_cap_mb=0.001)},
    "static graph": {"strategy": auto(static_graph=True)},
    "unused parameters": {"strategy": auto(find_unused_parameters=True)},
    "strict": {"strategy": strict(4)},
    "bf16": {"precision": "bf16"},
}


class Counting(nn.Module):
    """Reads buffers in training that it then changes: one in place, one by another tensor. A third one is
    made in the first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("seen", torch.ones(()))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("made", None, persistent=False)
        self.seen: Tensor
        self.mean: Tensor
        self.made: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if self.made is None:
            self.made = torch.full((16,), 0.5)
        y = torch.tanh(self.layer(x) / self.seen.clone() - self.mean) * self.made
        if self.training:
            self.seen += 0.25
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(dim=0)
        return y


class Remembering(nn.Module):
    """An LSTM with a state that is handed over by name, under a name that torch's checkpoint has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 4, batch_first=True)

    def forward(
        self, x: Tensor, *, debug: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        state = None if debug is None else (debug["h"], debug["c"])
        out, (h, c) = self.cell(x.view(len(x), 4, 4), state)
        return out.flatten(1), {"h": h, "c": c}


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, 16)
        self.norms = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3))
            for _ in range(2)
        )
        self.noisy = nn.Dropout(0.2)
        self.counting_block = Counting()
        self.memory_block = Remembering()
        self.attention_block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm in self.norms:
            x = norm(x)
        x, state = self.memory_block(self.counting_block(self.noisy(x)))
        x, _ = self.memory_block(x, debug=state)
        x = self.attention_block(x.view(len(x), 4, 4)).flatten(1)
        out: Tensor = self.head(x)
        return out


def recomputed(patterns: list[str] = PATTERNS) -> nn.Module:
    model = Everything()
    recompute(model, patterns)
    return model


def train(
    folder: Path,
    make_model: Callable[[], nn.Module],
    ranks: int,
    how: str = "ddp",
    stop_at: int | None = None,
) -> tuple[dict[str, Any], bytes]:
    """The last saved state, and the metrics."""
    plan = replace(PLAN, shards=4) if how == "strict" else PLAN

    def rank(world: World) -> None:
        observers = [Jsonl()] if world.is_first else []
        fit = Fit(plan, make_model=make_model, observers=observers, **STRATEGIES[how])
        fit.run(world, folder, stop_at if world.is_first else None)

    run_killed_at(stop_at, rank, ranks, folder)
    return newest_state(folder), (folder / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("how", STRATEGIES)
def test_the_same_bits(tmp_path: Path, how: str, ranks: int) -> None:
    """Weights, buffers, optimizer, averages, metrics. BatchNorm, dropout, LSTM, attention; micro-batches."""
    expected, lines = train(tmp_path / "kept", Everything, ranks, how)
    found, metrics = train(tmp_path / "again", recomputed, ranks, how)
    assert_same(expected, found)
    assert lines == metrics


def test_killed_and_gone_on_with_it_and_without(tmp_path: Path) -> None:
    expected, lines = train(tmp_path / "whole", Everything, 2)
    train(tmp_path / "killed", recomputed, 2, stop_at=2)
    train(tmp_path / "killed", Everything, 2, stop_at=4)
    found, metrics = train(tmp_path / "killed", recomputed, 2)
    assert_same(expected, found)
    assert lines == metrics


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "pattern"),
    [
        ("mobilenet_cifar10 data=shapes data.source.train=80 data.source.valid=20", "features.*"),
        ("transformer_text model.dropout=0.1 precision=bf16 data.order=shuffled", "blocks.*"),
        ("lstm_text model.dropout=0.1", "cells.*"),
    ],
)
def test_recipes_by_the_command_line(tmp_path: Path, recipe: str, pattern: str) -> None:
    words = f"recipe={recipe} device=cpu train.batch_size=8 train.steps=3 observers=[jsonl]"
    if "text" in recipe:
        write_text(tmp_path / "text.txt")
        words += " data=text data.source.path=text.txt data.window=16 data.valid_piece=64 model.ngrams=[2]"
        words += " model.width=32 model.layers=2 task.sample_tokens=2 ema.decay=0.9"
    folders = tmp_path / "kept", tmp_path / "again"
    for folder, more in zip(folders, ([], [f"train.recompute=[{pattern}]"]), strict=True):
        done = ddptrain(tmp_path, [*words.split(), f"run.dir={folder}", *more])
        assert done.code == 0, done.err
        assert ("recompute " in done.err) == bool(more)
    states = [newest_state(folder / "checkpoints") for folder in folders]
    assert_same(*states)
    metrics = [(folder / "metrics.jsonl").read_bytes() for folder in folders]
    assert metrics[0] == metrics[1]


def test_activations_take_less_memory(tmp_path: Path) -> None:
    peaks = []
    for name, patterns in (("kept", []), ("again", ["*"])):
        (tmp_path / name).mkdir()
        with allocations(tmp_path / name) as allocated:
            blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)]
            model = nn.Sequential(*blocks)
            recompute(model, patterns) if patterns else None
            weights = sum(p.numel() * p.element_size() for p in model.parameters())
            for _ in range(2):
                with phase("step"):
                    model(torch.randn(2000, 64)).sum().backward()
        peaks.append(allocated.peak("step") - 2 * weights)
    assert peaks[1] < 0.35 * peaks[0]


def test_flops_are_those_of_the_model() -> None:
    counts = []
    for model in (Everything(), recomputed()):
        with counter(torch.device("cpu")) as counted:
            loss = model(torch.randn(5, FEATURES)).sum()
            torch.autograd.grad(loss, list(model.parameters()))
        counts.append(counted.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_a_copy_has_weights_of_its_own_and_a_pickle_is_plain() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    names = list(model.state_dict())
    recompute(model, ["0"])
    x = torch.ones(2, 3, requires_grad=True)
    expected = model(x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied[0]) is nn.Linear
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        assert torch.equal(copied(x), torch.zeros(2, 3))
        assert torch.equal(model(x), expected)
    replica = model[0]._replicate_for_data_parallel()  # what strategy=dp makes for each GPU
    replica.weight, replica.bias = torch.zeros(3, 3), torch.zeros(3)
    assert not replica(x).any()
    assert list(model.state_dict()) == names
    assert isinstance(model[0], nn.Linear)


def test_the_outermost_match_is_taken_and_each_block_runs_twice() -> None:
    model = resnet18(num_classes=4)
    assert recompute(model, ["layer*", "layer1.0.conv1"]) == ["layer1", "layer2", "layer3", "layer4"]
    passes = []
    model.layer1[0].conv1.register_forward_hook(lambda *_: passes.append(1))
    model.layer1.register_forward_hook(lambda *_: passes.append(2))
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert passes == [1, 2, 1]
    model.eval()
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert passes == [1, 2, 1, 1, 2]


def test_rates_by_depth_are_those_of_the_model_as_it_is_written() -> None:
    optim = {"lr": 0.1, "layer_decay": 0.5}
    stages = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(3)]
    models = {nn.Sequential(*stages): "0", resnet18(num_classes=4): "layer2.0"}
    for model, pattern in models.items():
        expected = [str(group) for group in parameter_groups(model, optim)]
        recompute(model, [pattern])
        assert [str(group) for group in parameter_groups(model, optim)] == expected


def test_a_compiled_model_is_one_graph_and_trains_the_same() -> None:
    states = []
    for patterns in ([], ["0", "1"]):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(2)]
        model = nn.Sequential(*blocks, nn.Linear(8, 2))
        if patterns:
            recompute(model, patterns)
        model.compile(backend="aot_eager", fullgraph=True)
        for x in torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(1)):
            model(x).square().sum().backward()
        states.append({**model.state_dict(), **{n: p.grad for n, p in model.named_parameters()}})
    assert_same(*states)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("blocks", "train.recompute=blocks: matches the name of no module that is called."),
        (
            "noisey",
            "train.recompute=noisey: matches the name of no module that is called. Did you mean noisy?",
        ),
    ],
)
def test_what_matches_nothing_is_refused(pattern: str, said: str) -> None:
    model = Everything()
    model.blocks = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(UserError) as raised:
        recompute(model, ["noisy", pattern])
    assert str(raised.value).startswith(said)


def test_what_changes_its_input_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    recompute(model, ["*"])
    with pytest.raises(UserError, match="a ReLU that matches changes its input in place"):
        model(torch.randn(2, 4))


def test_a_pattern_that_is_no_list_is_refused(tmp_path: Path) -> None:
    assert "train.recompute" in refusal(tmp_path, "recipe=cnn_digits train.recompute=features")


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerDecoderLayer(8, 2, 8, dropout=0.0, batch_first=True)


@pytest.mark.parametrize("name", ["tgt", "memory"])
def test_an_input_by_name_that_is_changed_later_is_noticed(name: str) -> None:
    """Not a wrong gradient."""
    model = Named()
    recompute(model, ["block"])
    inputs = {"tgt": torch.randn(2, 3, 8), "memory": torch.randn(2, 5, 8)}
    out = model.block(**inputs)
    inputs[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
