"""The other trainers that throughput.py compares, each as its own documentation has it."""

import logging
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

from loops import BASE, LOG_EVERY, Run, by_hand, with_ddptrain
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from workloads import Batch


def with_lightning(run: Run) -> None:
    """Tuned: without its progress bar, checkpoints and model summary."""
    import lightning
    from lightning.pytorch.loggers import TensorBoardLogger
    from lightning.pytorch.strategies import DDPStrategy

    _quieten("lightning.pytorch", "lightning.fabric")

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.net = run.model()

        def training_step(self, batch: Batch, index: int) -> Tensor:
            loss = run.loss(self.net, batch)
            self.log("train/loss", loss, batch_size=len(batch[1]))
            return loss

        def configure_optimizers(self) -> Optimizer:
            return run.optimizer(self.net)

    trainer = lightning.Trainer(
        max_steps=run.steps,
        accelerator="cpu",
        devices=run.world.size,
        strategy=DDPStrategy(process_group_backend="gloo") if run.world.size > 1 else "auto",
        logger=TensorBoardLogger(str(run.folder)),
        log_every_n_steps=LOG_EVERY,
        enable_checkpointing=not run.tuned,
        enable_progress_bar=not run.tuned,
        enable_model_summary=not run.tuned,
        use_distributed_sampler=False,
        default_root_dir=str(run.folder),
    )
    trainer.fit(Module(), run)


def with_fabric(run: Run) -> None:
    """The loop is the user's, the set-up Fabric's."""
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import TensorBoardLogger
    from lightning.fabric.strategies import DDPStrategy

    _quieten("lightning.fabric")
    fabric = Fabric(
        accelerator="cpu",
        devices=run.world.size,
        strategy=DDPStrategy(process_group_backend="gloo") if run.world.size > 1 else "auto",
        loggers=TensorBoardLogger(str(run.folder)),
    )
    fabric.launch()
    bare = run.model()
    model, optimizer = fabric.setup(bare, run.optimizer(bare))
    model.train()
    for step, batch in enumerate(run, start=1):
        loss = run.loss(model, batch)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        if step % LOG_EVERY == 0:
            fabric.log("train/loss", loss.item(), step)


def with_accelerate(run: Run) -> None:
    """The loop of its quick tour. The batches are each rank's own already, so it gets none to share out."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=str(run.folder))
    accelerator.init_trackers("run")
    bare = run.model()
    model, optimizer = accelerator.prepare(bare, run.optimizer(bare))
    model.train()
    for step, batch in enumerate(run, start=1):
        optimizer.zero_grad()
        loss = run.loss(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        if step % LOG_EVERY == 0:
            accelerator.log({"train/loss": loss.item()}, step=step)
    for tracker in accelerator.trackers:
        tracker.finish()


def with_ignite(run: Run) -> None:
    """Its Engine around the user's step, and its TensorBoard handler."""
    from ignite.engine import Engine, Events
    from ignite.handlers.tensorboard_logger import TensorboardLogger

    _quieten("ignite")
    model: nn.Module = run.model()
    optimizer = run.optimizer(model)
    if run.world.size > 1:
        model = DistributedDataParallel(model)  # as idist.auto_model does
    model.train()

    def step(engine: Any, batch: Batch) -> Tensor:
        loss = run.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    trainer = Engine(step)
    writer = TensorboardLogger(log_dir=str(run.folder)) if run.world.is_first else None
    if writer is not None:
        every = Events.ITERATION_COMPLETED(every=LOG_EVERY)
        writer.attach_output_handler(
            trainer, every, tag="train", output_transform=lambda x: {"loss": x.item()}
        )
    trainer.run(run, max_epochs=1, epoch_length=run.steps)
    if writer is not None:
        writer.close()


def _quieten(*names: str) -> None:
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)


class Peer(NamedTuple):
    title: str
    package: str
    train: Callable[[Run], None]
    tuned: bool = True

    def is_installed(self) -> bool:
        return any(True for _ in metadata.Distribution.discover(name=self.package))


PEERS = {
    BASE: Peer("hand-written loop, tuned", "torch", by_hand),
    "plain": Peer("hand-written loop, torch's defaults", "torch", by_hand, tuned=False),
    "ddptrain": Peer("**ddptrain**", "ddptrain", with_ddptrain),
    "ignite": Peer("Ignite", "pytorch-ignite", with_ignite),
    "fabric": Peer("Lightning Fabric", "lightning", with_fabric),
    "accelerate": Peer("Accelerate", "accelerate", with_accelerate),
    "lightning": Peer("Lightning", "lightning", with_lightning),
    "lightning-defaults": Peer("Lightning, its defaults", "lightning", with_lightning, tuned=False),
}
