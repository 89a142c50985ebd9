"""Any model with any loss: the gradient of the plain script, on any number of ranks and micro-batches."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from toy import Fit, lr_schedule, weights

from ddptrain.api.recipe import Loss, Progress
from ddptrain.api.world import World
from ddptrain.data.tensors import TensorData
from ddptrain.engine.plan import Plan
from ddptrain.errors import UserError
from ddptrain.recipes.batch_loss import BatchLoss
from ddptrain.recipes.batch_metrics import FunctionMetric
from ddptrain.recipes.supervised import Supervised
from ddptrain.testing import run_ranks

N, FEATURES, CLASSES, STEPS = 36, 6, 4, 3
LR = 0.2
_GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(N, FEATURES, generator=_GENERATOR)
LABELS = torch.randint(CLASSES, (N,), generator=_GENERATOR)
NUMBERS = torch.randn(N, CLASSES, generator=_GENERATOR)
RATES = torch.rand(N, CLASSES, generator=_GENERATOR)
TOKENS = torch.randint(CLASSES, (N, 3), generator=_GENERATOR).masked_fill(
    torch.rand(N, 3, generator=_GENERATOR) < 0.4, -100
)
WEIGHT = torch.tensor([0.2, 1.0, 3.0, 0.5])


def flat() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def tokens() -> nn.Module:
    """Logits (n, classes, 3)."""
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 3 * CLASSES), nn.Unflatten(1, (CLASSES, 3))
    )


def first_of_batch(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def counted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    each = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    kept = batch[1] > 0
    return Loss((each * kept).sum(), kept.sum(), {"kept": kept.sum().float()})


def kept_mean(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, reduction="none")[target > 0].mean()


Plain = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, Any], Plain | None]] = {
    "CrossEntropyLoss": (flat, LABELS, {"loss": nn.CrossEntropyLoss()}, None),
    "smoothed": (flat, LABELS, {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, None),
    "weighted": (flat, LABELS, {"loss": nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1)}, None),
    "one ignored": (flat, LABELS, {"loss": nn.CrossEntropyLoss(ignore_index=2)}, None),
    "padded": (tokens, TOKENS, {"loss": nn.CrossEntropyLoss()}, None),
    "padded and weighted": (tokens, TOKENS, {"loss": nn.CrossEntropyLoss(weight=WEIGHT)}, None),
    "probabilities": (flat, NUMBERS.softmax(1), {"loss": nn.CrossEntropyLoss()}, None),
    "NLLLoss": (lambda: nn.Sequential(flat(), nn.LogSoftmax(1)), LABELS, {"loss": nn.NLLLoss(WEIGHT)}, None),
    "MSELoss": (flat, NUMBERS, {"loss": nn.MSELoss()}, None),
    "HuberLoss": (flat, NUMBERS, {"loss": nn.HuberLoss()}, None),
    "BCE": (flat, RATES.round(), {"loss": nn.BCEWithLogitsLoss(pos_weight=WEIGHT)}, None),
    "KL": (
        lambda: nn.Sequential(flat(), nn.LogSoftmax(1)),
        NUMBERS.softmax(1),
        {"loss": nn.KLDivLoss(reduction="batchmean")},
        None,
    ),
    "multi-margin": (flat, LABELS, {"loss": nn.MultiMarginLoss()}, None),
    "soft margins": (flat, RATES.round(), {"loss": nn.MultiLabelSoftMarginLoss()}, None),
    "a mean": (flat, LABELS, {"loss": functional.cross_entropy}, None),
    "a sum": (
        flat,
        LABELS,
        {"loss": lambda output, target: functional.cross_entropy(output, target, reduction="sum")},
        functional.cross_entropy,
    ),
    "one for each": (
        flat,
        LABELS,
        {"loss": lambda output, target: functional.cross_entropy(output, target, reduction="none")},
        functional.cross_entropy,
    ),
    "a step": (flat, LABELS, {"step": first_of_batch}, functional.cross_entropy),
    "a counting step": (flat, LABELS, {"step": counted}, kept_mean),
}


def by_hand(model: nn.Module, target: Tensor, loss: Plain) -> Tensor:
    """The plain script, on whole batches: their order does not matter."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(model(X), target).backward()
        optimizer.step()
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_the_plain_script(name: str, size: int, tmp_path: Path) -> None:
    make_model, target, given, plain = LOSSES[name]
    torch.manual_seed(0)
    model = make_model()
    expected_loss = plain or given["loss"]
    plan = Plan(steps=STEPS, train_size=N, batch_size=N, micro_batch=7, eval_batch_size=10, seed=1)

    def rank(world: World) -> tuple[Tensor, float]:
        data = TensorData((X, target), (X, target))
        task = Supervised(model, data, **given)
        optim = {"_target_": "torch.optim.SGD", "lr": LR}
        fit = Fit(plan, optim=optim, sched=lr_schedule("constant", warmup=0.0))
        state, report = fit.train(task, data, world, tmp_path)
        return weights(state), report.metrics["loss"]

    results = run_ranks(rank, size)
    expected = by_hand(model, target, expected_loss)
    with torch.no_grad():
        value = float(expected_loss(model(X), target))
    for trained, loss in results:
        torch.testing.assert_close(trained, expected, rtol=0, atol=2e-6)
        assert loss == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("time", [3, 5, 40])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(ignore_index=-1), None])
def test_samples_are_counted_by_their_targets(loss: nn.Module | None, time: int) -> None:
    """Of inputs (time, samples, features), and of a target for each element of a sequence."""

    class LastOfTime(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs[-1, :, :CLASSES]

    class Flattened(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs[..., :CLASSES].flatten(0, 1)

    def right(output: Tensor, target: Tensor) -> Tensor:
        return (output.argmax(1) == target).float()

    inputs = torch.randn(time, 5, FEATURES)
    models: list[tuple[nn.Module, int]] = [(LastOfTime(), 5), (Flattened(), time * 5)]
    for model, count in models:
        target = torch.randint(CLASSES, (count,))
        data = TensorData((X, LABELS), (X, LABELS))
        task = Supervised(model, data, loss=loss or functional.cross_entropy, metrics={"right": right})
        result = task.loss(model, (inputs, target), Progress(0, 0, 0.0))
        expected = functional.cross_entropy(model(inputs), target)
        assert int(result.count) == count
        assert float(result.sum) / count == pytest.approx(float(expected), rel=1e-5)
        means = task.report(dict(task.evaluate(model, (inputs, target)))).metrics  # type: ignore[arg-type]
        assert means["loss"] == pytest.approx(float(expected), rel=1e-5)
        assert means["right"] == pytest.approx(float(right(model(inputs), target).mean()))


REFUSED: dict[str, tuple[Any, Tensor, str]] = {
    "a shape of its own": (lambda output, target: output.mean(0), LABELS, "shape (4,) for 9 samples"),
    "no tensor": (lambda output, target: 0.5, LABELS, "returned float"),
    "of pairs": (
        lambda output, target: (output @ output.T).logsumexp(1).mean(),
        LABELS,
        "neither their mean",
    ),
    "a label of -100": (nn.CrossEntropyLoss(), LABELS.masked_fill(LABELS == 1, -100), "ignore_index=-1"),
    "broadcast": (nn.MSELoss(), NUMBERS[:, 0], "each output with each target"),
    "broadcast by a function": (
        lambda o, t: ((o[:, :1] - t) ** 2).mean(),
        NUMBERS[:, 0],
        "neither their mean",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_understood_is_refused(name: str) -> None:
    loss, target, said = REFUSED[name]
    model = nn.Sequential(flat(), nn.Linear(CLASSES, 1)) if name == "broadcast" else flat()
    task = Supervised(model, TensorData((X, target)), loss)
    with pytest.raises(UserError) as error:
        task.loss(model, (X[:9], target[:9]), Progress(0, 0, 0.0))
    assert said in str(error.value)


def test_batches_that_are_padded_to_a_length_of_their_own_need_a_step() -> None:
    task = Supervised(nn.Identity(), TensorData((X, NUMBERS)), nn.MSELoss())

    def loss(samples: int, length: int) -> Loss:
        zeros = torch.zeros(samples, length)
        return task.loss(nn.Identity(), (zeros, zeros + 1), Progress(0, 0, 0.0))

    assert (loss(3, 4).count, loss(2, 4).count) == (12, 8)
    with pytest.raises(UserError, match=r"has 18 values for 3 samples, and had 12 for 3.*step="):
        loss(3, 6)


def test_whole_pictures_are_measured_after_crops_of_them() -> None:
    """Their values are counted one by one, so the mean is that of all."""
    task, sums = Supervised(nn.Identity(), TensorData((X, NUMBERS)), nn.MSELoss()), [0.0, 0.0]
    crops, wholes = (torch.zeros(3, 4), torch.ones(3, 4)), [torch.ones(1, 9), torch.full((2, 16), 2.0)]
    task.loss(nn.Identity(), crops, Progress(0, 0, 0.0))
    with torch.no_grad():
        for whole in wholes:
            measured = task.evaluate(nn.Identity(), (torch.zeros_like(whole), whole))
            sums = [sums[0] + float(measured["/loss/sum"]), sums[1] + int(measured["/loss/count"])]
    assert sums == [9 * 1 + 32 * 4, 9 + 32]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give one of them"),
        ({"loss": nn.MSELoss(), "step": first_of_batch}, "give one of them"),
        ({"step": first_of_batch, "metrics": {"a": kept_mean}}, "which step= does not tell"),
        ({"loss": "mse"}, "must be a loss module or a function"),
        ({"loss": nn.Sequential(nn.Linear(2, 1))}, "has parameters (0.weight, 0.bias)"),
        ({"loss": nn.MSELoss(), "metrics": {"loss": kept_mean}}, "metrics.loss: is the name of the loss"),
        ({"loss": nn.MSELoss(), "metrics": {"a": 3}}, "metrics.a=3: must be a metric"),
        ({"loss": nn.MSELoss(), "metrics": {"a": nn.MSELoss}}, "made with its arguments"),
        (
            {"loss": nn.MSELoss(), "metrics": {"a": kept_mean}, "best_metric": "a"},
            "higher is better isn't known",
        ),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        Supervised(flat(), TensorData((X, NUMBERS)), **given)
    assert said in str(error.value)


def test_one_class_of_a_torchmetric_may_be_the_best() -> None:
    """Which way is better is the metric's to say."""
    classification = pytest.importorskip("torchmetrics.classification")
    f1 = classification.MulticlassF1Score(3, average=None)
    distance = classification.MulticlassHammingDistance(3, average=None)
    metrics = {"f1": f1, "f1_distance": distance}
    data, loss = TensorData((X, LABELS)), nn.CrossEntropyLoss()
    assert Supervised(flat(), data, loss, metrics, best_metric="f1/0").higher_is_better
    assert not Supervised(flat(), data, loss, metrics, best_metric="f1_distance/0").higher_is_better
    with pytest.raises(UserError, match=r"best_metric=f2/0: there is no such metric; there are loss, f1"):
        Supervised(flat(), data, loss, metrics, best_metric="f2/0")


def test_batches_of_another_kind_ask_for_a_step() -> None:
    task = Supervised(flat(), TensorData((X, LABELS)), nn.CrossEntropyLoss())
    with pytest.raises(UserError, match="give step="):
        task.loss(flat(), {"x": X, "y": LABELS}, Progress(0, 0, 0.0))


def test_several_inputs_and_function_metrics(tmp_path: Path) -> None:
    """On three ranks of batches that don't divide as by one loop."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = flat(), flat()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            output: Tensor = self.left(x) + self.right(y)
            return output

    torch.manual_seed(1)
    model, other = Two(), X.flip(0)
    metrics = {
        "accuracy": lambda output, target: (output.argmax(1) == target).float(),
        "margin": lambda output, target: output.max(1).values.mean(),
    }
    plan = Plan(steps=1, train_size=N, batch_size=N, eval_batch_size=5)

    def rank(world: World) -> dict[str, float]:
        data = TensorData((X, other, LABELS), (X, other, LABELS))
        task = Supervised(
            model, data, nn.CrossEntropyLoss(), metrics, best_metric="accuracy", higher_is_better=True
        )
        optim = {"_target_": "torch.optim.SGD", "lr": 0.0}
        return dict(Fit(plan, optim=optim).train(task, data, world, tmp_path)[1].metrics)

    with torch.no_grad():
        output = model(X, other)
    for report in run_ranks(rank, 3):
        assert report["accuracy"] == pytest.approx(float((output.argmax(1) == LABELS).float().mean()))
        assert report["margin"] == pytest.approx(float(output.max(1).values.mean()))


def test_what_some_batches_log_is_the_mean_over_those(tmp_path: Path) -> None:
    def step(model: nn.Module, batch: Any) -> Loss:
        x, labels = batch
        loss = nn.functional.cross_entropy(model(x), labels, reduction="sum")
        seen = labels == 1
        logs = {"ones": 6.0 * len(x)} if seen.any() else {}
        return Loss(loss, len(x), {name: torch.tensor(value) for name, value in logs.items()})

    labels = torch.zeros(N, dtype=torch.int64)
    labels[2] = 1
    data = TensorData((X, labels), (X, labels))
    task = Supervised(flat(), data, None, step=step)
    plan = Plan(steps=1, train_size=N, batch_size=N, eval_batch_size=5)
    for report in run_ranks(lambda world: Fit(plan).train(task, data, world, tmp_path)[1].metrics, 2):
        assert report["ones"] == pytest.approx(6.0)


def of_pairs(output: Tensor, target: Tensor) -> Tensor:
    """0 for one sample."""
    return (output[:, None] - output[None]).abs().mean()


ALIKE, RISING = torch.ones(40), torch.arange(40.0)


@pytest.mark.parametrize(
    ("function", "output", "said"),
    [
        (lambda output, target: output.mean(), RISING, None),
        (lambda output, target: (output > 30).sum(), RISING, None),  # of the first four: 0
        (lambda output, target: output.max(), RISING, "neither their mean nor"),
        (lambda output, target: output.max(), torch.cat([ALIKE, RISING]), "neither their mean nor"),
        (of_pairs, RISING, "neither their mean nor"),
        (lambda output, target: output["x"].mean(), {"x": RISING, "aux": torch.tensor(1.0)}, None),
    ],
)
def test_a_metric_function_is_a_mean_on_any_number_of_ranks(
    function: Any, output: Any, said: str | None
) -> None:
    """In batches of 40, and of 20, of each of which a rank has half."""
    values, rows = [], len(output["x"]) if isinstance(output, dict) else len(output)
    for size in (40, 20):
        metric, totals = FunctionMetric("m", function), {"m/sum": 0.0, "m/count": 0}
        with pytest.raises(UserError, match=said) if said else nullcontext():
            for start in range(0, rows, size):
                part = slice(start, start + size)
                some = {**output, "x": output["x"][part]} if isinstance(output, dict) else output[part]
                for key, value in metric.sums(some, torch.zeros(size), size).items():
                    totals[key] += float(value)
        values.append(totals["m/sum"] / max(1, totals["m/count"]))
    assert said or values[0] == pytest.approx(values[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_added_up_in_single(dtype: torch.dtype) -> None:
    """In fp16 300 samples of a mean of 2906 overflow; bf16 keeps three digits of a sum."""
    numbers = (2906 + 100 * NUMBERS.flatten().repeat(3)).to(dtype)[:300]
    reduced = BatchLoss(lambda output, target: (output - target).mean())
    zeros = torch.zeros(300, dtype=dtype)
    for loss in (reduced, BatchLoss(nn.L1Loss()), BatchLoss(lambda output, target: output - target)):
        total = loss(numbers, zeros, 300).sum
        assert total.dtype == torch.float32
        assert float(total) == pytest.approx(float(numbers.double().sum()), rel=1e-3)
    metric = FunctionMetric("m", lambda output, target: output.mean())
    sums = metric.sums(numbers, zeros, 300)
    assert float(sums["m/sum"]) == pytest.approx(float(numbers.double().sum()), rel=1e-6)


class Outputs(dict[str, Tensor]):
    """As transformers' ModelOutput: its entries are attributes, and it refuses update."""

    def __getattr__(self, name: str) -> Tensor:
        return self[name]

    def update(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_metric_is_given_what_the_model_gives(dtype: torch.dtype) -> None:
    output = Outputs(logits=NUMBERS.to(dtype))
    metric = FunctionMetric("m", lambda output, target: (output.logits.argmax(-1) == target).float())
    assert int(metric.sums(output, LABELS, N)["m/sum"]) == int((NUMBERS.argmax(-1) == LABELS).sum())
    assert output.logits.dtype == dtype
