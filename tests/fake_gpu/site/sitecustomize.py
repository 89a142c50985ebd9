"""In each process below ``python tests/fake_gpu``: CUDA's first use switches the emulation on, and the
engine's steps are watched. FAKE_GPU_WATCH=0: they are not."""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))


class _After(importlib.abc.MetaPathFinder):
    """Does something after a module was imported."""

    def __init__(self, name: str, then: Any) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            self._then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _emulate(torch: Any) -> None:
    import rnns  # noqa: F401  # torch's kernel for autocast, before anybody replaces it

    initialise = torch.cuda._lazy_init

    def initialised() -> None:
        initialise()
        import emulate

        emulate.activate()

    torch.cuda._lazy_init = initialised


def _watch(loop: Any) -> None:
    import watch

    watch.watch(loop)


sys.meta_path.insert(0, _After("torch", _emulate))
if os.environ.get("FAKE_GPU_WATCH") != "0":
    sys.meta_path.insert(0, _After("ddptrain.engine.loop", _watch))
