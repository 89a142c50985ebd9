"""What a machine without a network lacks, carried as wheels."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from gpu_parts.part import ROOT

MISSING = ("hydra-core", "omegaconf", "faster-coco-eval", "cloudpickle")
"""Dependencies of the project that an image with torch in it seldom has."""
BESIDE = ("antlr4-python3-runtime==4.9.3", "setuptools>=77")
"""What these need in turn, and what installs the checkout. antlr4 has a source archive only, and its wheel is
built."""
PYTHON = "3.12"
GLIBC = ("2_17", "2_27", "2_28")


def fetch(folder: Path) -> None:
    """Bring the wheels to a folder, on a machine that has a network."""
    folder.mkdir(parents=True, exist_ok=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [word for word in project["dependencies"] if word.startswith(MISSING)]
    platforms = [f"--platform=manylinux_{version}_x86_64" for version in GLIBC]
    binary = ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp", *platforms]
    built, ready = BESIDE
    _pip("download", "--no-deps", *binary, "-d", str(folder), *asked, ready)
    _pip("wheel", "--no-deps", "-w", str(folder), built)
    for wheel in sorted(folder.glob("*.whl")):
        print(f"{wheel.stat().st_size / 2**20:6.1f} MiB  {wheel.name}")


def install(folder: Path, site: Path) -> None:
    """Put the wheels (once) and this checkout (as it is now) into ``site``, and that before all else for
    what is started from here on."""
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        raise SystemExit(f"--wheels={folder}: holds no wheel; --fetch-wheels={folder} brings them")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    quiet = ("install", "-q", "--no-index", "--no-deps", "--target", str(site))
    if not site.exists():
        _pip(*quiet, *wheels)
    _pip(*quiet, "--upgrade", "--no-build-isolation", str(ROOT))
    sys.path.insert(0, str(site))


def _pip(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *words])
    if done.returncode != 0:
        raise SystemExit(f"pip {words[0]}: exit code {done.returncode}, see above")
