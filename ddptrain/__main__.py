"""``python -m ddptrain`` and ``torchrun -m ddptrain``."""

import sys

from ddptrain.cli import main
from ddptrain.distributed.lifeline import end_with

if __name__ == "__main__":
    end_with(main, sys.argv[1:])
