"""The machine: what it is, and what its device can do at all."""

import json
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from gpu_parts.part import Job, need

ABILITIES = ("computes", "graphs", "compiles", "profiles", "finds_races")
"""Of abilities.py, which brings torch."""
_FACTS = """
import json, platform
from importlib import metadata, util
import torch
assert torch.cuda.is_available(), "torch.cuda.is_available() is false"
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
packages = ("torch", "torchvision", "triton", "omegaconf", "numpy")
versions = {name: metadata.version(name) for name in packages if util.find_spec(name)}
print(json.dumps({
    "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, {gpu.major}.{gpu.minor}" for gpu in gpus],
    "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
    "python": platform.python_version(), "system": platform.platform(), "versions": versions,
}))
"""


def machine(job: Job) -> str:
    from ddptrain.distributed.cpu import cores  # here: gpu.py itself may yet have to install ddptrain

    facts = json.loads(job.run("facts", "-c", _FACTS).out.splitlines()[-1])
    job.figure("facts", {**facts, "processor": _processor(), "cores": cores()})
    nodes = [node for name in ("nvidia*", "nvhost*", "dxg") for node in Path("/dev").glob(name)]
    lacks = {} if nodes else {"exists": "CUDA answers, but there is no device node such as /dev/nvidiactl"}
    for name in ABILITIES:
        variables = {"TORCH_CUDA_SANITIZER": "1"} if name == "finds_races" else {}
        words = [str(Path(__file__).with_name("abilities.py")), name]
        ran = job.run(name, *words, code=None, **variables)
        if ran.code != 0:
            lacks[name] = _reason(ran.code, ran.said)
    job.figure("lacks", lacks)
    said = f"{len(facts['gpus'])} x {facts['gpus'][0]}"
    if not lacks:
        return said
    # of a real device each of these is expected
    need(is_simulated(lacks), f"{said} lacks {', '.join(lacks)}")
    return f"{said}, simulated: it lacks {', '.join(lacks)}"


def is_simulated(lacks: Mapping[str, str]) -> bool:
    """Whether CUDA answers for a device that is not there."""
    return "exists" in lacks


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.*)$", file.read_text(), re.MULTILINE) if file.exists() else None
    return model[1] if model else platform.processor()


def _reason(code: int, said: str) -> str:
    if code < 0:
        return f"died of signal {-code}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    reason = (errors or lines or [f"exit code {code}"])[-1]
    return re.sub(r"/\S+/", "", reason)[:200].rstrip(".")  # where a file lies is this machine's own affair
