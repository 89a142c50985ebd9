"""strategy=fsdp: trains like ddp and single, in a part of the memory; its checkpoints fit any world."""

import gc
import os
import random
import re
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from compare import assert_same
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from toy import CLASSES, FEATURES, SGD, Classify, CountPositives, Fit, auto, plain, run_killed_at, with_noise

from ddptrain.api.recipe import Loss, Progress
from ddptrain.api.world import World
from ddptrain.engine.checkpoint import Checkpointer
from ddptrain.engine.plan import Plan
from ddptrain.engine.recompute import recompute
from ddptrain.engine.saved_checkpoint import read, unpack
from ddptrain.errors import Diverged, UserError
from ddptrain.testing import run_ranks

PLAN = Plan(
    steps=9, train_size=103, batch_size=24, eval_batch_size=40, eval_every=3, save_every=3, verify_every=2,
    seed=3, clip_norm=1.0, micro_batch=4,
)  # fmt: skip
ADAM = {"_target_": "torch.optim.AdamW", "lr": 0.01}
HALVES = ["bf16", pytest.param("fp16", marks=pytest.mark.long)]
ALL_IN_PARTS = 0.0
"""whole_checkpoint_gb, for any model."""


def fsdp(name: str = "fsdp", **arguments: Any) -> dict[str, Any]:
    file = Path(__file__).parents[2] / f"conf/strategy/{name}.yaml"
    return {**yaml.safe_load(file.read_text()), "gather": "fp32", **arguments}


class Transformer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        layers = [nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True) for _ in range(3)]
        self.blocks = nn.Sequential(*layers)
        self.last = nn.Linear(width, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(features)[:, None])[:, 0])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 16, 2, batch_first=True)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        return self.last(self.lstm(features.view(len(features), -1, 3))[0][:, -1])


class Convolutions(nn.Module):
    """Inverted residual blocks, with GroupNorm: BatchNorm depends on the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self._block() for _ in range(2)))
        self.last = nn.Linear(FEATURES, CLASSES)

    @staticmethod
    def _block() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 6, 1), nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.GroupNorm(2, 6), nn.Hardswish(),
            nn.Conv2d(6, 1, 1),
        )  # fmt: skip

    def forward(self, features: Tensor) -> Tensor:
        pictures = features.view(len(features), 1, 3, 4)
        return self.last((pictures + self.blocks(pictures)).flatten(1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": Transformer, "lstm": Recurrent, "convolutions": Convolutions, "one group": plain,
}  # fmt: skip


def ran(fit: Fit, size: int, folder: Path, stop_at: int | None = None, nodes: int = 1) -> list[list[Tensor]]:
    """The samples that each rank was given. ``folder`` has the checkpoints."""

    def rank(world: World) -> list[Tensor]:
        local = world.size // nodes
        world = replace(world, local_rank=world.rank % local, local_size=local)
        return fit.run(world, folder, stop_at)[1].asked

    if stop_at is None:
        return run_ranks(rank, size)
    run_killed_at(stop_at, rank, size, folder)
    return []


def state_in(folder: Path) -> dict[str, Any]:
    saved = Checkpointer(folder, keep=2).newest()
    assert saved is not None
    return unpack(saved) | {"metrics": dict(saved.manifest["metrics"])}


def distance(one: dict[str, Any], other: dict[str, Any], part: str = "model") -> float:
    return max(float((one[part][name] - value).abs().max()) for name, value in other[part].items())


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=[pytest.mark.long] * ((name, size) != ("transformer", 2)))
        for name in MODELS
        for size in (2, 3, 4)
    ],
)
def test_trains_like_single_and_ddp(name: str, size: int, tmp_path: Path) -> None:
    """With accumulation, clipping and averaged weights."""
    for dtype, allowed in ((torch.float32, 1e-5), (torch.float64, 1e-11)):
        fit = Fit(PLAN, lambda d=dtype: MODELS[name]().to(d), dtype=dtype, ema=0.9)  # type: ignore[misc]
        states = []
        for strategy, ranks in ((auto(), 1), (auto(), size), (fsdp(), size)):
            folder = tmp_path / f"{len(states)}-{dtype}"
            ran(replace(fit, strategy=strategy), ranks, folder)
            states.append(state_in(folder))
        single, ddp, own = states
        assert distance(own, single) < allowed
        assert distance(own, ddp) < allowed
        assert distance(own["average"], single["average"], "weights") < allowed
        momenta = (state["optimizer"]["state"] for state in (own, single))
        for ours, theirs in zip(*(each.values() for each in momenta), strict=True):
            torch.testing.assert_close(
                ours["momentum_buffer"], theirs["momentum_buffer"], rtol=0, atol=10 * allowed
            )


class _InPlace(nn.Module):
    """Writes to its blocks' outputs, which are views: of a linear layer with a bias, in three dimensions."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(3, 3)) for _ in range(blocks))
        self.last = nn.Linear(3, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        x = features.view(len(features), -1, 3)
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return self.last(x)


class _ClassifyInPlace(Classify):
    """Writes to the model's output."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], progress: Progress) -> Loss:
        features, labels = batch
        logits = model(features)
        logits *= 2
        return Loss(nn.functional.cross_entropy(logits.sum(1), labels, reduction="sum"), len(labels))

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
        return super().evaluate(lambda features: model(features).sum(1), batch)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error:FSDP2-wrapped module")
@pytest.mark.parametrize("blocks", [0, 2])
def test_outputs_may_be_written_to(blocks: int, tmp_path: Path) -> None:
    """torch's FSDP forgets its hooks there: without a block, no weight was trained, and nothing said so."""
    fit = Fit(PLAN, partial(_InPlace, blocks), task=_ClassifyInPlace)
    for name, strategy in (("ddp", auto()), ("fsdp", fsdp())):
        ran(replace(fit, strategy=strategy), 2, tmp_path / name)
    assert distance(state_in(tmp_path / "fsdp"), state_in(tmp_path / "ddp")) < 1e-5


@pytest.mark.parametrize("precision", HALVES)
def test_computes_in_half_precision_as_ddp_does(precision: str, tmp_path: Path) -> None:
    """The same casts: only sums over ranks are rounded differently."""
    fit = Fit(PLAN, Transformer, precision=precision, ema=0.9)
    for name, strategy in (("ddp", auto()), ("fsdp", fsdp())):
        ran(replace(fit, strategy=strategy), 2, tmp_path / name)
    assert distance(state_in(tmp_path / "fsdp"), state_in(tmp_path / "ddp")) < 1e-4
    scalers = [state_in(tmp_path / name)["scaler"] for name in ("ddp", "fsdp")]
    assert scalers[0] == scalers[1]
    assert bool(scalers[0]) == (precision == "fp16")


@pytest.mark.parametrize("precision", HALVES)
def test_weights_that_are_sent_in_half_precision_train_as_well(precision: str, tmp_path: Path) -> None:
    """Autocast casts most of them before their use anyway; sums of gradients stay in float32."""
    fit = Fit(PLAN, Transformer, precision=precision, ema=0.9)
    for gather in ("fp32", precision):
        ran(replace(fit, strategy=fsdp(gather=gather)), 2, tmp_path / gather)
    theirs, own = state_in(tmp_path / "fp32"), state_in(tmp_path / precision)
    assert own["metrics"]["loss"] == pytest.approx(theirs["metrics"]["loss"], abs=0.01)
    assert 0 < distance(own, theirs) < 0.05
    assert {value.dtype for value in own["model"].values()} == {torch.float32}


def test_weights_of_norms_over_the_batch_are_sent_as_they_are(tmp_path: Path) -> None:
    """BatchNorm takes none of another dtype than its statistics'."""
    fit = Fit(PLAN, with_noise, precision="bf16")
    for gather in ("fp32", "bf16"):
        ran(replace(fit, strategy=fsdp(gather=gather)), 2, tmp_path / gather)
    assert_same(state_in(tmp_path / "bf16"), state_in(tmp_path / "fp32"))


class Traffic(TorchDispatchMode):
    """Bytes by collective, and what is live of all that operators have made."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self._made: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func.namespace == "c10d":
            name = func.__name__.partition(".")[0].strip("_")
            whole = args[1] if name == "reduce_scatter_base" else args[0]
            self.sent[name] += whole.numel() * whole.element_size() if isinstance(whole, Tensor) else 0
        for one in result if isinstance(result, tuple | list) else [result]:
            if type(one) is Tensor:
                self._made.add(StorageWeakRef(one.untyped_storage()))
        return result

    def live(self) -> int:
        """Bytes. FSDP frees a tensor's memory, and keeps the tensor."""
        there = (torch.UntypedStorage._new_with_weak_ptr(made.cdata) for made in self._made)
        return sum(storage.nbytes() for storage in there if storage is not None)


class Between(Classify):
    """Notes what is live between the passes."""

    def loss(self, model: nn.Module, batch: Any, progress: Progress) -> Loss:
        loss = super().loss(model, batch, progress)
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, Traffic):
                gc.collect()  # what only waits for it is not held
                noted.append(mode.live())
        return loss


noted: list[int] = []


def test_weights_are_sent_in_half_the_bytes_and_held_once(tmp_path: Path) -> None:
    """Of those that are gathered in float32 autocast makes copies, and keeps them until the backward pass."""
    width, plan = 128, Plan(steps=3, train_size=100, batch_size=2, log_every=100)
    model = Transformer(width)
    rest = sum(p.numel() for layer in (model.first, model.last) for p in layer.parameters())
    rest += width + 1  # two ranks send six rows of the five classes' weights
    blocks = sum(p.numel() for p in model.blocks.parameters())

    def watched(gather: str) -> tuple[Counter[str], int]:
        traffic = Traffic()

        def steps(numbers: Iterable[int]) -> Iterator[int]:
            first, one, *others = numbers
            yield first
            with traffic:
                yield one
            yield from others

        fit = Fit(
            plan, lambda: Transformer(width), task=Between, precision="bf16", step_iterator=steps,
            strategy=fsdp(gather=gather),
        )  # fmt: skip

        def rank(world: World) -> tuple[Counter[str], int]:
            fit.run(world, tmp_path / gather)
            return traffic.sent, noted[0]

        return run_ranks(rank, 2)[0]

    (full, held), (half, held_once) = watched("fp32"), watched("bf16")
    assert full["allgather_base"] == 4 * (rest + 2 * blocks)
    assert half["allgather_base"] * 2 == full["allgather_base"]
    assert half["reduce_scatter_base"] == full["reduce_scatter_base"] == 4 * (rest + blocks)
    assert held > 2 * blocks
    assert held_once < 0.2 * 2 * blocks


@pytest.mark.parametrize("size", [2, 3, 4])
def test_evaluates_like_single_to_the_last_digit(size: int, tmp_path: Path) -> None:
    fit = Fit(PLAN, plain, optim=dict(SGD, lr=0.0), ema=0.9)
    ran(fit, 1, tmp_path / "one")
    ran(replace(fit, strategy=fsdp()), size, tmp_path / "many")
    assert state_in(tmp_path / "one")["metrics"] == state_in(tmp_path / "many")["metrics"]


class EvaluatesUnevenly(Classify):
    """As a decoder does: parts of the model, so often as the data say."""

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
        assert isinstance(model, Transformer)
        for _ in range(int(batch[0].abs().sum()) % 5):
            model.blocks[1:](model.first(batch[0])[:, None])
        return super().evaluate(model, batch)


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_may_evaluate_with_different_passes(size: int, tmp_path: Path) -> None:
    """A rank may also have no batch at all."""
    plan = replace(PLAN, eval_every=1, eval_batch_size=60)
    fit = Fit(plan, Transformer, task=EvaluatesUnevenly, optim=dict(SGD, lr=0.0))
    ran(fit, 1, tmp_path / "one")
    ran(replace(fit, strategy=fsdp()), size, tmp_path / "many")
    assert state_in(tmp_path / "one")["metrics"] == state_in(tmp_path / "many")["metrics"]


def test_a_count_that_only_the_device_knows(tmp_path: Path) -> None:
    fit = Fit(PLAN, Transformer, task=CountPositives)
    ran(fit, 1, tmp_path / "one")
    ran(replace(fit, strategy=fsdp()), 3, tmp_path / "many")
    assert distance(state_in(tmp_path / "many"), state_in(tmp_path / "one")) < 1e-5


def killed_and_resumed(seed: int, tmp_path: Path, gb: float) -> None:
    drawn = random.Random(seed)
    size, stop_at = drawn.choice([2, 3, 4]), drawn.choice([3, 6])
    make = drawn.choice([Transformer, Recurrent, with_noise])
    optim = drawn.choice([SGD, ADAM])
    precision = drawn.choice(["fp32", "bf16"])
    strategy = fsdp(whole_checkpoint_gb=gb, gather=precision)
    fit = Fit(
        PLAN, make, optim=dict(optim), ema=0.9, strategy=strategy, precision=precision,
        background=drawn.choice([False, True]),
    )  # fmt: skip
    ran(fit, size, tmp_path / "whole")
    ran(fit, size, tmp_path / "killed", stop_at)
    ran(fit, size, tmp_path / "killed")
    assert_same(state_in(tmp_path / "whole"), state_in(tmp_path / "killed"))


@pytest.mark.parametrize("gb", [pytest.param(1.0, marks=pytest.mark.long), ALL_IN_PARTS])
def test_a_killed_run_ends_with_the_same_bits(gb: float, tmp_path: Path) -> None:
    killed_and_resumed(1, tmp_path, gb)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_any_killed_run_ends_with_the_same_bits(seed: int, tmp_path: Path) -> None:
    killed_and_resumed(seed, tmp_path, [1.0, ALL_IN_PARTS][seed % 2])


@pytest.mark.parametrize("gb", [pytest.param(1.0, marks=pytest.mark.long), ALL_IN_PARTS])
def test_any_number_of_ranks_goes_on(gb: float, tmp_path: Path) -> None:
    """4, then 2, then 3 ranks, then a single process: the same state, and each sample once an epoch."""
    plan = replace(PLAN, steps=12)
    one = Fit(plan, Transformer, ema=0.9)
    many = replace(one, strategy=fsdp(whole_checkpoint_gb=gb))
    (asked,) = ran(one, 1, tmp_path / "one")
    for ranks, stop_at in ((4, 3), (2, 6), (3, 9)):
        ran(many, ranks, tmp_path / "many", stop_at)
        assert (tmp_path / f"many/step-{stop_at}/shards").is_dir() == (gb == ALL_IN_PARTS)
    (rest,) = ran(one, 1, tmp_path / "many")
    a_step = len(asked) // 12  # micro-batches a step
    for ours, expected in zip(rest[-3 * a_step :], asked[-3 * a_step :], strict=True):
        assert torch.equal(ours, expected)
    found, expected_state = state_in(tmp_path / "many"), state_in(tmp_path / "one")
    assert distance(found, expected_state) < 1e-5
    assert found["metrics"] == pytest.approx(expected_state["metrics"], abs=1e-4)


@pytest.mark.parametrize(
    "harm",
    [
        "flipped",
        *(
            pytest.param(harm, marks=pytest.mark.long)
            for harm in ("two swapped", "missing", "cut", "no metadata")
        ),
    ],
)
def test_a_damaged_part_is_noticed_and_the_checkpoint_before_is_used(harm: str, tmp_path: Path) -> None:
    fit = Fit(PLAN, Transformer, strategy=fsdp(whole_checkpoint_gb=ALL_IN_PARTS))
    ran(fit, 2, tmp_path / "run")
    shards = tmp_path / "run/step-9/shards"
    first, second = sorted(shards.glob("*.distcp"))
    if harm == "missing":
        first.unlink()
    elif harm == "cut":
        first.write_bytes(first.read_bytes()[:-1])
    elif harm == "flipped":
        content = bytearray(first.read_bytes())
        content[len(content) // 2] ^= 1
        first.write_bytes(content)
    elif harm == "two swapped":
        first.rename(shards / "kept")
        second.rename(first)
        (shards / "kept").rename(second)
    else:
        (shards / ".metadata").unlink()
    with pytest.raises(UserError, match=r"step-9: shards/\S+ .*damaged"):
        read(tmp_path / "run/step-9")
    newest = Checkpointer(tmp_path / "run", keep=2).newest()
    assert newest is not None
    assert newest.path.name == "step-6"


def test_parts_on_disks_that_are_not_shared_are_refused(tmp_path: Path) -> None:
    """Not a checkpoint that nobody can read."""
    fit = Fit(PLAN, Transformer, strategy=fsdp(whole_checkpoint_gb=ALL_IN_PARTS))

    def rank(world: World) -> str:
        (tmp_path / str(world.rank)).mkdir()
        os.chdir(tmp_path / str(world.rank))
        with pytest.raises(UserError) as found:
            fit.run(world, Path("run"))
        return str(found.value)

    for message in run_ranks(rank, 2):
        assert "all nodes need the run's folder on a disk that they share" in message
    assert not list((tmp_path / "0/run").iterdir())


def test_a_disk_that_refuses_one_rank_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    fit = Fit(PLAN, Transformer, strategy=fsdp(whole_checkpoint_gb=ALL_IN_PARTS))
    ran(fit, 2, tmp_path, stop_at=3)

    def rank(world: World) -> str:
        if world.rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(UserError) as found:
            fit.run(world, tmp_path)
        return str(found.value)

    for message in run_ranks(rank, 2):
        assert re.search(r"can't be saved \(.*; [\d,]+ bytes needed\)", message), message
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("best")] == ["step-3"]
    read(tmp_path / "step-3")


class Versioned(nn.Linear):
    """Its weights were ten times as large in files of version 1, which had no number."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *more: Any) -> None:
        if metadata.get("version") is None:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] / 10
        super()._load_from_state_dict(state, prefix, metadata, *more)


@pytest.mark.parametrize(
    ("strategy", "size"),
    [(auto(), 1), pytest.param(fsdp(), 2, marks=pytest.mark.long), (fsdp(whole_checkpoint_gb=0.0), 2)],
)
def test_a_resume_keeps_the_versions_of_modules(strategy: dict[str, Any], size: int, tmp_path: Path) -> None:
    fit = Fit(PLAN, lambda: nn.Sequential(Versioned(FEATURES, CLASSES)), strategy=strategy)
    ran(fit, size, tmp_path / "whole")
    ran(fit, size, tmp_path / "killed", stop_at=3)
    ran(fit, size, tmp_path / "killed")
    assert_same(state_in(tmp_path / "whole"), state_in(tmp_path / "killed"))


def test_metadata_runs_no_code(tmp_path: Path) -> None:
    """A pickle of torch's: a foreign folder could hold any other, with the right hash."""
    import hashlib
    import json
    import pickle

    from ddptrain.engine.saved_checkpoint import sealed

    class Hostile:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    ran(Fit(PLAN, plain, strategy=fsdp(whole_checkpoint_gb=ALL_IN_PARTS)), 2, tmp_path / "run")
    folder = tmp_path / "run/step-9"
    written = pickle.dumps(Hostile())
    (folder / "shards/.metadata").write_bytes(written)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["files"]["shards/.metadata"] = {
        "sha256": hashlib.sha256(written).hexdigest(), "bytes": len(written),
    }  # fmt: skip
    (folder / "manifest.json").write_bytes(sealed(manifest))
    with pytest.raises(UserError, match="is not a state of ddptrain"):
        unpack(read(folder))
    assert not (tmp_path / "ran").exists()


def held_bytes(state: Any) -> int:
    """Of weights, gradients and optimizer: what a rank holds, each storage once."""
    optimizer = [value for values in state.optimizer.state.values() for value in values.values()]
    tensors = [*state.model.parameters(), *(p.grad for p in state.model.parameters()), *optimizer]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors if isinstance(t, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


def largest_live_bytes() -> int:
    """Of all tensors of this process, each storage once."""
    gc.collect()
    seen = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and thing.device.type == "cpu":
            seen[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(seen.values())


def test_a_rank_of_four_holds_a_quarter_of_the_state(tmp_path: Path) -> None:
    """At most 0.30 of single's. All live tensors count, too: nothing keeps the whole weights."""

    def measured(strategy: dict[str, Any], size: int) -> list[tuple[int, int]]:
        def rank(world: World) -> tuple[int, int]:
            before = largest_live_bytes()
            fit = Fit(
                replace(PLAN, steps=2, save_every=None, eval_every=None), lambda: Transformer(128),
                optim=ADAM, strategy=strategy,
            )  # fmt: skip
            state, _, _ = fit.run(world, tmp_path)
            return held_bytes(state), largest_live_bytes() - before

        return run_ranks(rank, size)

    [(single, all_of_single)] = measured(auto(), 1)
    for own, all_own in measured(fsdp(), 4):
        assert own <= 0.30 * single
        assert all_own <= 0.30 * all_of_single


class NotFiniteAt(Classify):
    """On rank 1, in step 5."""

    def loss(self, model: nn.Module, batch: Any, progress: Progress) -> Loss:
        found = super().loss(model, batch, progress)
        bad = progress.step == 4 and torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        return Loss(found.sum * float("nan"), found.count) if bad else found


def test_a_step_that_is_not_finite_is_skipped_on_all_ranks(tmp_path: Path) -> None:
    fit = Fit(replace(PLAN, skips_nonfinite=True), with_noise, task=NotFiniteAt, strategy=fsdp())
    ran(fit, 2, tmp_path)
    state = state_in(tmp_path)
    assert (state["step"], state["left_out"]) == (9, 1)
    assert all(bool(value.isfinite().all()) for value in state["model"].values())


def test_or_ends_the_run_with_its_place(tmp_path: Path) -> None:
    fit = Fit(PLAN, with_noise, task=NotFiniteAt, strategy=fsdp())

    def rank(world: World) -> str:
        with pytest.raises(Diverged) as found:
            fit.run(world, tmp_path)
        return str(found.value)

    for message in run_ranks(rank, 3):
        assert "step 5 is not finite" in message
        assert "rank 1: the loss, though all outputs are finite" in message


def test_what_is_frozen_stays_and_is_thawed(tmp_path: Path) -> None:
    fit = Fit(PLAN, Transformer, freeze=["blocks.*"], thaw_at=4)
    ran(fit, 1, tmp_path / "one")
    ran(replace(fit, strategy=fsdp()), 2, tmp_path / "many", stop_at=3)
    ran(replace(fit, strategy=fsdp()), 2, tmp_path / "many")
    frozen, first = (unpack(read(tmp_path / name / "step-6"))["model"] for name in ("one", "many"))
    for name, value in frozen.items():
        torch.testing.assert_close(first[name], value, rtol=0, atol=1e-5)
    assert distance(state_in(tmp_path / "many"), state_in(tmp_path / "one")) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("gb", [1.0, ALL_IN_PARTS])
def test_replicas_of_two_nodes_train_like_single(gb: float, tmp_path: Path) -> None:
    fit = Fit(PLAN, Transformer, ema=0.9)
    many = replace(fit, strategy=fsdp("hsdp", whole_checkpoint_gb=gb))
    ran(fit, 1, tmp_path / "one")
    ran(many, 4, tmp_path / "many", stop_at=6, nodes=2)
    ran(many, 4, tmp_path / "many", nodes=2)
    assert distance(state_in(tmp_path / "many"), state_in(tmp_path / "one")) < 1e-5


@pytest.mark.parametrize(
    "wrap",
    [*(pytest.param(wrap, marks=pytest.mark.long) for wrap in ([], ["blocks.*"])), ["blocks.[01]", "last"]],
)
@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.long)])
def test_what_is_a_block_changes_no_number(wrap: Sequence[str], reshard: bool, tmp_path: Path) -> None:
    strategy = fsdp(wrap=wrap, reshard_after_forward=reshard)
    fit = Fit(replace(PLAN, steps=3), Transformer)
    ran(replace(fit, strategy=strategy), 2, tmp_path / "own")
    ran(replace(fit, strategy=fsdp()), 2, tmp_path / "default")
    assert distance(state_in(tmp_path / "own"), state_in(tmp_path / "default")) < 1e-6


class Scaled(nn.Module):
    """With a buffer that autograd holds from the forward to the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 32), nn.Linear(32, CLASSES)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, 32))

    def forward(self, features: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(features) * self.scale))


class TwoPasses(Classify):
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], progress: Progress) -> Loss:
        features, labels = batch
        first, second = (
            super(TwoPasses, self).loss(model, (x, labels), progress) for x in (features, -features)
        )
        return Loss(first.sum + 0.1 * second.sum, first.count)


def test_a_loss_may_call_a_model_with_buffers_twice(tmp_path: Path) -> None:
    fit = Fit(replace(PLAN, steps=3), Scaled, task=TwoPasses)
    ran(fit, 1, tmp_path / "one")
    ran(replace(fit, strategy=fsdp()), 2, tmp_path / "many")
    assert distance(state_in(tmp_path / "many"), state_in(tmp_path / "one")) < 1e-5


class Drifting(Scaled):
    """A buffer that follows each rank's own samples."""

    def forward(self, features: Tensor) -> Tensor:
        if self.training:
            self.scale.mul_(0.5).add_(features.detach().abs().mean())
        return super().forward(features)


def test_after_a_thaw_all_ranks_begin_with_the_first_ones_buffers(tmp_path: Path) -> None:
    """As under ddp: the passes that a thaw warms up with are no step's."""
    plan = replace(PLAN, steps=5, eval_every=5)  # an evaluation gives all ranks the same
    fit = Fit(plan, Drifting, freeze=("first.*",), thaw_at=3)
    ran(replace(fit, strategy=auto()), 2, tmp_path / "ddp")
    ran(replace(fit, strategy=fsdp()), 2, tmp_path / "fsdp")
    assert distance(state_in(tmp_path / "fsdp"), state_in(tmp_path / "ddp")) < 1e-5


def test_layers_learn_at_their_rates(tmp_path: Path) -> None:
    """optim.layer_decay looks for repeated blocks, by their classes."""
    fit = Fit(replace(PLAN, steps=3), Transformer, optim=dict(SGD, layer_decay=0.5))
    ran(fit, 1, tmp_path / "one")
    ran(replace(fit, strategy=fsdp()), 2, tmp_path / "many")
    groups = state_in(tmp_path / "many")["groups"]
    assert groups == state_in(tmp_path / "one")["groups"]
    assert len(groups) > 3


@pytest.mark.parametrize(
    "patterns", [pytest.param(["blocks.*"], marks=pytest.mark.long), ["blocks.1", "last"]]
)
def test_activations_that_are_computed_again_change_no_bit(patterns: list[str], tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = Transformer()
        recompute(model, patterns)
        return model

    fit = Fit(replace(PLAN, steps=3), Transformer, strategy=fsdp())
    ran(fit, 2, tmp_path / "kept")
    ran(replace(fit, make_model=make), 2, tmp_path / "again")
    assert_same(state_in(tmp_path / "kept"), state_in(tmp_path / "again"))


def sent(folder: Path, micro_batch: int | None, **arguments: Any) -> Counter[str]:
    """Messages of a step in the middle, by torch's profiler."""
    names: list[str] = []

    def counted(steps: Iterable[int]) -> Iterator[int]:
        first, one, *rest = steps
        yield first
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            yield one
        names.extend(event.name for event in seen.events() or ())
        yield from rest

    plan = Plan(steps=3, train_size=1000, batch_size=24, micro_batch=micro_batch, log_every=100)
    fit = Fit(plan, Transformer, strategy=fsdp(**arguments), step_iterator=counted)

    def rank(world: World) -> Counter[str]:
        fit.run(world, folder / f"{micro_batch}-{arguments}")
        return Counter(name.removeprefix("c10d::").strip("_") for name in names if name.startswith("c10d::"))

    ours, theirs = run_ranks(rank, 2)
    assert ours == theirs
    return ours


def test_messages_of_a_step(tmp_path: Path) -> None:
    """Three blocks and the rest. Gradients are sent once a step, however many micro-batches there are; beside
    them there are the ranks' flags, and whether a number is not finite."""
    gradients = {"reduce_scatter_base": 4, "allreduce": 2}
    assert sent(tmp_path, None) == gradients | {"allgather_base": 4 + 3}
    assert sent(tmp_path, 6) == gradients | {"allgather_base": 2 * (4 + 3)}
    assert sent(tmp_path, 6, reshard_after_forward=False) == gradients | {"allgather_base": 2 * 4}


def refused(fit: Fit, folder: Path, size: int = 2) -> str:
    def rank(world: World) -> str:
        with pytest.raises(UserError) as found:
            fit.run(world, folder)
        return str(found.value)

    return run_ranks(rank, size)[0]


def test_a_pattern_without_a_module_is_refused(tmp_path: Path) -> None:
    assert "strategy.wrap: block.* matches the name of no module" in refused(
        Fit(PLAN, Transformer, strategy=fsdp(wrap=["block.*"])), tmp_path
    )


class Tied(Transformer):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].linear1.weight = self.blocks[0].linear1.weight


def test_blocks_that_share_a_parameter(tmp_path: Path) -> None:
    """By default they are left in the rest; named, they are refused."""
    fit = Fit(replace(PLAN, steps=3), Tied)
    ran(fit, 1, tmp_path / "one")
    ran(replace(fit, strategy=fsdp()), 2, tmp_path / "many")
    assert distance(state_in(tmp_path / "many"), state_in(tmp_path / "one")) < 1e-5
    named = replace(fit, strategy=fsdp(wrap=["blocks.0"]))
    assert "strategy.wrap: blocks.0 has a parameter that is used outside, too" in refused(
        named, tmp_path / "no"
    )


def test_samples_of_a_step_are_gone_through_in_equally_many_passes(tmp_path: Path) -> None:
    """103 samples a step on 3 ranks: 34, 34 and 35; each of them in 5 passes of at most 7."""
    plan = replace(PLAN, batch_size=103, micro_batch=7, train_size=206, steps=2)
    ran(Fit(plan, Transformer), 1, tmp_path / "one")
    ran(Fit(plan, Transformer, strategy=fsdp()), 3, tmp_path / "many")
    assert distance(state_in(tmp_path / "many"), state_in(tmp_path / "one")) < 1e-5
    with pytest.raises(UserError, match=r"train\.micro_batch=1: .* different numbers of micro-batches"):
        replace(plan, micro_batch=1).check_equal_passes(World(size=3, local_size=3))
