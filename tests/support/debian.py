"""Programs of Debian's packages, brought into a folder of their own: the system stays as it is."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path


class CannotRun(Exception):
    """Why a program can't be had here."""


def unpack(packages: Sequence[str], folder: Path) -> Path:
    """The packages, and what they need that is not installed, under ``folder``; returns where they lie as
    they would below /. Raises CannotRun."""
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise CannotRun(f"there is no apt-get here to get Debian's {packages[0]} with")
    apt, root = folder / "apt", folder / "root"
    for name in ("lists", "archives"):
        (apt / name / "partial").mkdir(parents=True)
    own = [
        f"-oDir::State::lists={apt}/lists",
        f"-oDir::Cache={apt}",
        *("-oDebug::NoLocking=true", "-oAPT::Sandbox::User=", "-oAcquire::http::Timeout=20", "-qq"),
    ]
    download = ["install", "--yes", "--no-install-recommends", "--download-only", *packages]
    for words in (["update"], download):
        ended = subprocess.run(["apt-get", *own, *words], capture_output=True, text=True, timeout=280)
        if ended.returncode:
            raise CannotRun(f"apt-get {words[0]} failed: {ended.stderr.strip()}")
    archives = sorted((apt / "archives").glob("*.deb"))
    if not archives:
        raise CannotRun(f"{packages[0]} is installed here; these tests bring one of their own")
    for archive in archives:
        subprocess.run(["dpkg", "-x", archive, root], check=True, timeout=120)
        archive.unlink()
    return root
