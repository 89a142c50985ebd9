"""Code that the user put beside the configs, which they may name."""

import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from ddptrain.cli.compose import ENTRY_POINTS
from ddptrain.config.instantiate import open_package
from ddptrain.errors import UserError

_LIBRARIES = frozenset({"ddptrain", "torch", "torchvision", *sys.stdlib_module_names})
"""Never a user's own code, also where the current folder is a checkout of one of them."""


def open_user_code(config_dirs: Sequence[Path]) -> None:
    """Let configs name code that the user put beside them: modules in the folder of --config-dir or
    the current folder, and installed packages that carry recipes."""
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        open_package(entry.value.partition(".")[0])
    for folder in config_dirs:
        if not folder.is_dir():
            raise UserError(f"--config-dir={folder}: there is no such folder.")
        sys.path.insert(0, str(folder.resolve()))
    for folder in (Path.cwd(), *config_dirs):
        for path in folder.iterdir() if folder.is_dir() else []:
            is_module = path.suffix == ".py" or (path / "__init__.py").is_file()
            if is_module and path.stem.isidentifier() and path.stem not in _LIBRARIES:
                open_package(path.stem)
