"""TensorBoard: scalars under train/, valid/, perf/ and time/, pictures, and HPARAMS with final metrics."""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch

from ddptrain.api.observer import End, Evaluated, Log, Observer, RunInfo, Start
from ddptrain.api.recipe import Picture, TextSample
from ddptrain.keys import flat_values
from ddptrain.observe.drawer import shared_drawer
from ddptrain.observe.metrics_file import POSITION, read_lines

if TYPE_CHECKING:  # it is slow to import
    from torch.utils.tensorboard import SummaryWriter

_SHOWN_FIRST = ("recipe", "optim.lr", "optim.weight_decay", "train.batch_size", "seed")
_FLUSH_S = 5
"""Seconds of scalars that a killed process may lose. metrics.jsonl loses at most a tenth of a second, and
nothing from before a checkpoint."""


@final
class TensorBoard(Observer):
    """One event stream per run; after a resume TensorBoard drops what an earlier process wrote after the
    resumed step (``purge_step``), so no point is shown twice."""

    def __init__(self) -> None:
        self._run = RunInfo()
        self._hook_before = threading.excepthook
        self._opened: SummaryWriter | None = None

    @property
    def _writer(self) -> "SummaryWriter":
        assert self._opened is not None
        return self._opened

    def start(self, event: Start) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._run = event.run
        threading.excepthook = partial(_without_the_writers, self._hook_before)
        first = event.step if event.evaluates else event.step + 1
        self._opened = SummaryWriter(
            str(event.run.folder / "tensorboard"), purge_step=first, flush_secs=_FLUSH_S
        )
        for line in read_lines(event.run.folder / "metrics.jsonl") if event.evaluates else []:
            if line["step"] == event.step and line["split"] == "train":  # dropped with the evaluation there
                values = {n: v for n, v in line.items() if n not in POSITION}
                self._scalars({"train": {**values, "epoch": line["epoch"]}}, event.step)
        if event.preview is not None and event.step == 0:
            self._writer.add_image("train/samples", _tile(event.preview), 0)

    def log(self, event: Log) -> None:
        timing = event.timing
        perf = {"samples_per_s": timing.samples_per_s} | ({} if timing.mfu is None else {"mfu": timing.mfu})
        groups = {
            "train": {**event.values, "epoch": event.epoch},
            "perf": perf,
            "time": timing.shares,
            "device": self._run.devices.latest(),
        }
        self._scalars(groups, event.step)

    def evaluated(self, event: Evaluated) -> None:
        self._scalars({"valid": event.metrics}, event.step)
        for name, figure in event.figures.items():
            if isinstance(figure, TextSample):
                self._writer.add_text(f"valid/{name}", _verbatim(figure.text), event.step)
            elif isinstance(figure, Picture):
                self._writer.add_image(f"valid/{name}", figure.pixels, event.step)
            else:
                shared_drawer().draw(name, figure, partial(self._add_png, f"valid/{name}", event.step))
        self._writer.flush()

    def end(self, event: End) -> None:
        shared_drawer().finish()
        metrics = event.result.metrics
        if metrics:
            self._add_hparams({f"hparam/{n}": v for n, v in metrics.items() if "/" not in n}, event.step)
        self._writer.close()
        threading.excepthook = self._hook_before

    def _add_png(self, tag: str, step: int, png: bytes) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        # width and height, from the PNG's header
        width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
        image = Summary.Image(encoded_image_string=png, width=width, height=height, colorspace=4)
        self._writer._get_file_writer().add_summary(
            Summary(value=[Summary.Value(tag=tag, image=image)]), step
        )

    def _add_hparams(self, metrics: dict[str, float], step: int) -> None:
        """Like the writer's add_hparams, but marks the settings that most often differ between runs:
        TensorBoard shows those first."""
        from tensorboard.plugins.hparams.plugin_data_pb2 import (  # type: ignore[import-untyped]
            HParamsPluginData,
        )
        from torch.utils.tensorboard.summary import hparams

        experiment, *session = hparams(_flat_settings(settings_of(self._run.config)), metrics)
        about = experiment.value[0].metadata.plugin_data
        content = HParamsPluginData.FromString(about.content)
        for setting in content.experiment.hparam_infos:
            setting.differs = setting.name in _SHOWN_FIRST
        about.content = content.SerializeToString()
        for summary in (experiment, *session):
            self._writer._get_file_writer().add_summary(summary, step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def _scalars(self, groups: Mapping[str, Mapping[str, float]], step: int) -> None:
        """Write all in one record: the writer's add_scalar makes one, with a checksum in Python, for each."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=f"{group}/{name}", simple_value=value)
            for group, named in groups.items()
            for name, value in named.items()
        ]
        self._writer._get_file_writer().add_summary(Summary(value=values), step)


def _without_the_writers(
    hook: Callable[[threading.ExceptHookArgs], object], args: threading.ExceptHookArgs
) -> None:
    """Print no traceback of the writer's thread: what it has raised, the writer raises at the next event."""
    if type(args.thread).__name__ != "_AsyncWriterThread":
        hook(args)


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the config that the training depends on."""
    return {
        name: value
        for name, value in config.items()
        if name not in ("run", "sweep", "observers", "controllers")
    }


def _flat_settings(settings: Mapping[str, Any]) -> dict[str, bool | float | int | str]:
    """Nested settings by dotted names, of the kinds that HPARAMS takes."""
    return {
        name: value if isinstance(value, bool | float | int | str) else str(value)
        for name, value in flat_values(settings).items()
    }


def _verbatim(text: str) -> str:
    """Markdown that shows a text verbatim, as code."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _tile(pictures: torch.Tensor) -> torch.Tensor:
    """uint8 (n, 3, H, W) -> (3, rows, columns): side by side, eight a row, with a thin margin."""
    rows = []
    padded = torch.nn.functional.pad(pictures, (1, 1, 1, 1))
    for row in padded.split(8):
        missing = 8 - len(row)
        blank = row.new_zeros((missing, *row.shape[1:]))
        rows.append(torch.cat(list(torch.cat([row, blank])), dim=2))
    return torch.cat(rows, dim=1)
