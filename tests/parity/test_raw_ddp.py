"""The engine against forty lines of plain PyTorch: the same data, the same weights."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from toy import Fit, Vectors, lr_schedule, plain, weights

from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.engine.plan import Plan
from ddptrain.testing import run_ranks

PLAN = Plan(steps=30, train_size=500, batch_size=40, seed=11, clip_norm=0.5)


def by_hand(world: World) -> Tensor:
    torch.manual_seed(PLAN.seed)
    data = Vectors(PLAN.train_size)
    model = plain()
    wrapped = DistributedDataParallel(model) if world.size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=PLAN.steps)
    sampler = Sampler(PLAN.train_size, PLAN.batch_size, PLAN.seed, world.rank, world.size)
    for ids, _ in sampler.samples(range(PLAN.steps), torch.device("cpu")):
        loss = nn.functional.cross_entropy(wrapped(data.features[ids]), data.labels[ids])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def test_same_weights_as_a_hand_written_loop(tmp_path: Path) -> None:
    for size in (1, 2):

        def engine(world: World, folder: Path = tmp_path / str(size)) -> Tensor:
            state, _, _ = Fit(PLAN, sched=lr_schedule(name="cosine")).run(world, folder)
            return weights(state)

        [expected, *_], [found, *_] = run_ranks(by_hand, size), run_ranks(engine, size)
        assert ((found - expected).norm() / expected.norm()).item() < 1e-6, f"{size} ranks"
