"""``ddptrain``, ``python -m ddptrain`` and ``torchrun -m ddptrain``."""

import os
import sys
from typing import NoReturn


def run() -> NoReturn:
    if sys.argv[1:3] == ["completion", "words"]:  # a shell's function, while somebody waits
        from ddptrain.verbs.complete import complete

        sys.exit(complete(*sys.argv[3:]))
    # imported here: a loader's workers import this module again, if their rank began as the command ddptrain
    from ddptrain.distributed.launcher.process import end_with
    from ddptrain.verbs.main import main

    end_with(main, sys.argv[1:])


def script() -> NoReturn:
    """The command ``ddptrain``. As with ``python -m``, modules of the current folder are found first."""
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    run()


if __name__ == "__main__":
    run()
