"""plots/: the run's curves and its newest figures."""

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import final

from ddptrain.api.observer import End, Evaluated, Observer, Start
from ddptrain.api.recipe import ConfusionMatrix, Curves, Picture, TextSample
from ddptrain.observe.drawer import shared_drawer
from ddptrain.observe.lock import lost
from ddptrain.text import replace_file


@final
class Plots(Observer):
    """Writes pictures and texts at each evaluation. Other figures, and curves from metrics.jsonl (which
    includes the time before a resume), are drawn by another process: the newest when there is time, the last
    at the end."""

    def __init__(self) -> None:
        self._run = Path()
        """The run's folder."""

    @property
    def _folder(self) -> Path:
        return self._run / "plots"

    @property
    def _metrics(self) -> Path:
        return self._run / "metrics.jsonl"

    def start(self, event: Start) -> None:
        self._run = event.run.folder

    def evaluated(self, event: Evaluated) -> None:
        self._folder.mkdir(exist_ok=True)
        for name, figure in event.figures.items():
            if isinstance(figure, TextSample):
                (self._folder / f"{name}.txt").write_text(figure.text, errors="replace")
            elif isinstance(figure, Picture):
                replace_file(self._folder / f"{name}.png", _as_png(figure))
            elif isinstance(figure, ConfusionMatrix | Curves):
                shared_drawer().draw(name, figure, self._writer(name))
        shared_drawer().draw_curves(self._metrics, self._writer("curves"))

    def end(self, event: End) -> None:
        if self._metrics.exists():
            self._folder.mkdir(exist_ok=True)
            shared_drawer().draw_curves(self._metrics, self._writer("curves"))
        shared_drawer().finish()

    def _writer(self, name: str) -> Callable[[bytes], None]:
        return partial(self._write_png, self._folder / f"{name}.png")

    def _write_png(self, path: Path, png: bytes) -> None:
        if lost(self._run) is None:  # while it was drawn
            replace_file(path, png)


def _as_png(picture: Picture) -> bytes:
    from torchvision.transforms.v2.functional import to_pil_image

    written = io.BytesIO()
    to_pil_image(picture.pixels).save(written, format="PNG")
    return written.getvalue()
