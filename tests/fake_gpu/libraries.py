"""Builds the fake GPU's libraries for the torch at hand, once: a few seconds of g++."""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from importlib import metadata, util
from pathlib import Path

HERE = Path(__file__).parent
SITE = Path(str(util.find_spec("torch").origin)).parents[1]  # type: ignore[union-attr]
_STUBBED = {"cublas": 0, "cusolver": 0, "cu": 0, "cuda": 801, "nccl": 5}
"""What a function returns that torch imports and the fake does not have: success, or "not supported"."""


def why_not() -> str:
    """Why it can't be built here; '' where it can."""
    if shutil.which("g++") is None or shutil.which("nm") is None:
        return "the fake GPU needs g++ and nm"
    if not (SITE / "torch/lib/libtorch_cuda.so").exists():
        return "the fake GPU needs a CUDA build of torch, and this is another one"
    if len(_headers()) < 3:
        return "the fake GPU needs the headers in the wheels that torch's CUDA build brings"
    return ""


def built() -> Path:
    """The folder with libfakegpu.so, and libcuda.so.1 and libnvidia-ml.so.1 for who loads them by name."""
    sources = [HERE / name for name in ("runtime.cpp", "nccl.inc", "driver.c", "nvml.c", "libraries.py")]
    mark = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    mark.update(f"{metadata.version('torch')} {SITE}".encode())
    folder = Path(tempfile.gettempdir()) / f"ddptrain-fake-gpu-{os.getuid()}-{mark.hexdigest()[:16]}"
    if not folder.exists():
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        _build(made)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    return folder


def environment(gpus: int) -> dict[str, str]:
    """What a process needs to find that many fake GPUs, and hands on to its children."""
    folder = built()
    return {
        "LD_PRELOAD": str(folder / "libfakegpu.so"),
        "LD_LIBRARY_PATH": _before(folder, "LD_LIBRARY_PATH"),
        "PYTHONPATH": _before(HERE / "site", "PYTHONPATH"),
        "FAKE_GPU_COUNT": str(gpus),
        "OMP_NUM_THREADS": "1",
        # Of torch >= 2.14: operators written in Triton, which has no GPU here to compile for.
        "TORCH_DISABLE_NATIVE_JIT": "1",
    }


def _before(folder: Path, variable: str) -> str:
    inherited = os.environ.get(variable)
    return f"{folder}{os.pathsep}{inherited}" if inherited else str(folder)


def _build(out: Path) -> None:
    headers = [f"-I{folder}" for folder in _headers()]
    torch = [*SITE.glob("torch/lib/lib*cuda*.so"), SITE / "torch/lib/libtorch_python.so"]
    importers = [*torch, *SITE.glob("torchvision/*.so")]
    shared = ["-O1", "-fPIC", "-shared", "-w"]
    runtime = ["g++", *shared, "-std=c++17", *headers, str(HERE / "runtime.cpp"), "-lpthread", "-lrt"]
    _link(out / "libfakegpu.so", runtime, importers, r"(?:__)?(cublas|cusolver|cuda|nccl)")
    driver = ["gcc", *shared, str(HERE / "driver.c")]
    _link(out / "libcuda.so.1", driver, [SITE / "torch/lib/libcaffe2_nvrtc.so"], "(cu)[A-Z]")
    _run("gcc", *shared, str(HERE / "nvml.c"), "-o", str(out / "libnvidia-ml.so.1"))


def _link(library: Path, command: list[str], importers: list[Path], pattern: str) -> None:
    """The library, with a stub for each function of these names that the importers want and it lacks."""
    _run(*command, "-o", str(library))
    imported = {name for importer in importers for name in _symbols("--undefined-only", importer)}
    wanted = {name: found[1] for name in imported if (found := re.match(pattern, name))}
    stubs = library.with_suffix(".stubs")
    missing = sorted(wanted.keys() - _symbols("--defined-only", library))
    stubs.write_text("".join(f"int {name}() {{ return {_STUBBED[wanted[name]]}; }}\n" for name in missing))
    _run("gcc", "-c", "-fPIC", "-w", "-x", "c", str(stubs), "-o", f"{stubs}.o")
    _run(*command, f"{stubs}.o", "-o", str(library))


def _symbols(which: str, library: Path) -> set[str]:
    lines = _run("nm", "-D", which, str(library)).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines}


def _headers() -> list[Path]:
    """Of the CUDA runtime, of NCCL, and in Triton's copy what the first of them includes."""
    wanted = (
        "nvidia/*/include/cuda_runtime_api.h",
        "nvidia/nccl/include/nccl.h",
        "triton/backends/nvidia/include/cuda.h",
    )
    return [found.parent for pattern in wanted for found in sorted(SITE.glob(pattern))[:1]]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout
