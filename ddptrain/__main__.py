"""``python -m ddptrain`` and ``torchrun -m ddptrain``."""

import sys

from ddptrain.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
