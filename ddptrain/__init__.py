"""ddptrain: train deep networks on one or many GPUs, DDP first.

Run it: ``torchrun -m ddptrain recipe=mobilenet_cifar10`` (see the README), or from Python: `fit`
(docs/fit.md), `train`, `Run` and `load` (docs/python.md).
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ddptrain.version import __version__

if TYPE_CHECKING:
    from ddptrain.python.curves import MetricRows
    from ddptrain.python.fit import fit
    from ddptrain.python.load import Trained, load
    from ddptrain.python.run import Run
    from ddptrain.python.train import train

__all__ = ["MetricRows", "Run", "Trained", "__version__", "fit", "load", "train"]

_MODULES = {
    "MetricRows": "curves", "Run": "run", "Trained": "load", "fit": "fit", "load": "load", "train": "train",
}  # fmt: skip

if not TYPE_CHECKING:  # a type checker would take every name for one of these

    def __getattr__(name):
        """Import at the first use: every command imports this package, and few need these."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.python.{_MODULES[name]}"), name)

    def __dir__():
        return [*globals(), *_MODULES]
