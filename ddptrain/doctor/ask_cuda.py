"""In a child: does CUDA start? By libcuda alone, for its number tells more than PyTorch's words."""

import ctypes
import platform
from pathlib import Path

from ddptrain.doctor.children import tell


def main() -> None:
    name = "nvcuda.dll" if platform.system() == "Windows" else "libcuda.so.1"
    try:
        cuda = ctypes.CDLL(name)
    except OSError as error:
        tell("cuda", {"error": str(error)})
        return
    version, count, text = ctypes.c_int(), ctypes.c_int(), ctypes.c_char_p()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    code = cuda.cuInit(0)
    if code:
        cuda.cuGetErrorString(code, ctypes.byref(text))
    else:
        code = cuda.cuDeviceGetCount(ctypes.byref(count))
    found = {"library": _file(name), "code": code, "version": version.value, "count": count.value}
    tell("cuda", {**found, "error": text.value.decode() if text.value else ""})


def _file(name: str) -> str:
    """Where the loader found it."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return name
    return next((line.split(maxsplit=5)[5] for line in maps if "/libcuda.so" in line), name)
