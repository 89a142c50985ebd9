"""What it takes for a rename to outlive a power cut."""

import os
from pathlib import Path


def flush_folder(path: Path) -> None:
    """Bring a folder's own entries to the disk: the names in it, not what the files hold."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
