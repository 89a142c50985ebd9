"""The script that one would write by hand, for one process or under torchrun."""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter
from work import BATCH, LOG_EVERY, STEPS, first_step_is_done, model, rows

rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if size > 1:
    dist.init_process_group("gloo")
network = bare = model()
if size > 1:
    network = DistributedDataParallel(bare, gradient_as_bucket_view=True)
network.train()
optimizer = torch.optim.SGD(bare.parameters(), lr=0.01, momentum=0.9, fused=True)
inputs, labels = rows()
writer = SummaryWriter("tensorboard") if rank == 0 else None
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
for step in range(1, STEPS + 1):
    ids = order[(step - 1) * BATCH : step * BATCH][rank::size]
    loss = cross_entropy(network(inputs[ids]), labels[ids])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step == 1:
        first_step_is_done()
    if step % LOG_EVERY == 0 and writer is not None:
        writer.add_scalar("train/loss", loss.item(), step)
if writer is not None:
    torch.save({"model": bare.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
    writer.close()
if size > 1:
    dist.barrier()
    dist.destroy_process_group()
