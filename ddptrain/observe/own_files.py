"""Files in a run's folder, which a stranger may have made. Links are not followed: they may lead to what is
not for those who will see it."""

from pathlib import Path


def is_own(path: Path) -> bool:
    """Whether it is a file, and no link to one."""
    return path.is_file() and not path.is_symlink()


def own_files(folder: Path, pattern: str) -> list[Path]:
    """Those of a folder, sorted; none of one that is a link."""
    return [] if folder.is_symlink() else sorted(filter(is_own, folder.glob(pattern)))
