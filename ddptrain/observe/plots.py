"""plots/: the run's curves and its newest figures, for those who would rather look."""

from pathlib import Path
from typing import final

from ddptrain.api.observer import End, Evaluated, Observer, Start
from ddptrain.api.recipe import ConfusionMatrix, Curves, Picture, TextSample
from ddptrain.observe.drawer import Drawer, shared_drawer


@final
class Plots(Observer):
    """Writes pictures and texts at each evaluation. Figures of numbers, and curves from metrics.jsonl, so
    that a resumed run shows all of itself, are drawn beside the training: the newest when there is time, and
    the last at the end."""

    def start(self, event: Start) -> None:
        self._metrics = event.run.folder / "metrics.jsonl"
        self._folder = event.run.folder / "plots"
        self._drawer: Drawer = shared_drawer()

    def evaluated(self, event: Evaluated) -> None:
        self._folder.mkdir(exist_ok=True)
        for name, figure in event.figures.items():
            if isinstance(figure, TextSample):
                (self._folder / f"{name}.txt").write_text(figure.text, errors="replace")
            elif isinstance(figure, Picture):
                write_picture(figure, self._folder / f"{name}.png")
            elif isinstance(figure, ConfusionMatrix | Curves):
                self._drawer.draw(name, figure, self._writer(name))
        self._drawer.draw_curves(self._metrics, self._writer("curves"))

    def end(self, event: End) -> None:
        if self._metrics.exists():
            self._folder.mkdir(exist_ok=True)
            self._drawer.draw_curves(self._metrics, self._writer("curves"))
        self._drawer.finish()

    def _writer(self, name: str) -> "_Writer":
        return _Writer(self._folder / f"{name}.png")


@final
class _Writer:
    """Writes a drawn figure, whole or not at all: it may be looked at while it is written."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, png: bytes) -> None:
        aside = self._path.with_suffix(".tmp")
        aside.write_bytes(png)
        aside.replace(self._path)


def write_picture(picture: Picture, path: Path) -> None:
    """As PNG, whole or not at all: it may be looked at while it is written."""
    from torchvision.transforms.v2.functional import to_pil_image

    aside = path.with_suffix(".tmp")
    to_pil_image(picture.pixels).save(aside, format="PNG")
    aside.replace(path)
