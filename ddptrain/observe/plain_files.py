"""Files in a run's folder, which a stranger may have made. Links are not followed: they may lead to what is
not for those who will see it."""

import os
from pathlib import Path


def is_plain_file(path: Path) -> bool:
    """Whether it is a file, and no link to one; False also where it may not be looked at."""
    return os.path.isfile(path) and not os.path.islink(path)


def plain_files(folder: Path, pattern: str) -> list[Path]:
    """Those of a folder, sorted; none of one that is a link."""
    return [] if folder.is_symlink() else sorted(filter(is_plain_file, folder.glob(pattern)))
