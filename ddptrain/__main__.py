"""``python -m ddptrain`` and ``torchrun -m ddptrain``."""

import sys

from ddptrain.cli import main
from ddptrain.distributed.lifeline import leave

if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except Exception:  # a bug: its traceback, as Python itself would print it
        sys.excepthook(*sys.exc_info())
        code = 1
    leave(code)
