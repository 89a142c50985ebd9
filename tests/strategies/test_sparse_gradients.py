"""Which optimizers and strategies take the sparse gradients of ``nn.Embedding(sparse=True)``."""

import pytest
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer, SparseAdam

from ddptrain.api.strategy import Strategy
from ddptrain.api.world import World
from ddptrain.engine.check_model import check_sparse, sparse_layers
from ddptrain.errors import UserError
from ddptrain.strategies.ddp import Ddp
from ddptrain.strategies.single import Single
from ddptrain.strategies.strict import Strict

STRATEGIES = {"single": Single(World()), "strict": Strict(World(), 2), "ddp": Ddp(World())}


@pytest.mark.parametrize(
    ("optimizer", "strategy", "said"),
    [
        *((optimizer, "single", "") for optimizer in (SGD, Adagrad, SparseAdam)),
        *((optimizer, "strict", "") for optimizer in (SGD, Adagrad)),
        *((Adam, strategy, "optim: Adam takes no sparse gradients, and 0 of") for strategy in STRATEGIES),
        (SparseAdam, "strict", "optim: SparseAdam takes sparse gradients alone, and strategy=strict adds up"),
        (SparseAdam, "ddp", "strategy: 0 of the model has sparse=True"),
        (SGD, "ddp", "Use sparse=False, or strategy=strict with SGD or Adagrad"),
    ],
)
def test_others_are_refused(optimizer: type[Optimizer], strategy: str, said: str) -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2))
    assert sparse_layers(model) == ["0"]
    chosen: Strategy = STRATEGIES[strategy]
    if not said:
        check_sparse(["0"], optimizer(model[0].parameters(), lr=0.1), chosen)
        return
    with pytest.raises(UserError) as error:
        check_sparse(["0"], optimizer(model[0].parameters(), lr=0.1), chosen)
    assert said in str(error.value)
