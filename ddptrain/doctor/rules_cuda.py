"""Do this PyTorch, this driver and CUDA_VISIBLE_DEVICES fit together? Each group follows from the one before.

The numbers are true as of November 2026 (PyTorch 2.15).
"""

import re
from collections.abc import Iterator

from ddptrain.doctor.facts import Facts
from ddptrain.doctor.findings import Finding, comma_list, ok, problem

DRIVER_FOR = {11: 450, 12: 525, 13: 580}
"""The oldest driver on Linux for each major CUDA (NVIDIA's table of minor-version compatibility)."""
CUDA_12 = (
    "pip install 'torch>=2.11,<2.15' torchvision --index-url <PyTorch's index cu126> (its address is on"
    ' PyTorch\'s page "Get started"; torch 2.15 has no build for CUDA 12 on the plain index)'
)
_HOW = "sudo ubuntu-drivers install, or sudo dnf update; for a container on its host"
_IN_WINDOWS = "in Windows, not inside WSL"
_CODES = {
    3: (
        "the driver starts, but not for this process: /dev/nvidia-uvm is missing, or the driver is in a bad"
        " state.",
        "sudo nvidia-modprobe -u -c=0; in a container start it anew with --gpus all; else reboot.",
    ),
    100: (
        "the driver runs and shows this process no GPU.",
        "nvidia-smi -L must list one; in a container start it with --gpus all, under SLURM ask for"
        " --gres=gpu:1.",
    ),
    101: (
        "a GPU was named that is not there, or it is one that CUDA can't run.",
        "unset CUDA_VISIBLE_DEVICES; nvidia-smi -L lists what there is.",
    ),
    802: (
        "the GPUs of this machine are joined by NVSwitch, and its fabric manager does not run (or still"
        " starts).",
        "sudo systemctl enable --now nvidia-fabricmanager, of the same version as the driver.",
    ),
    803: (
        "two versions of the driver meet: libcuda is not the one that belongs to the kernel module, mostly a"
        " 'compat' library of the container's image.",
        "take the folder of that libcuda out of LD_LIBRARY_PATH (unset LD_LIBRARY_PATH), or reboot after an"
        " update.",
    ),
    804: (
        "a 'compat' libcuda is loaded, and this kind of GPU (GeForce) takes only the driver's own.",
        "take the folder /usr/local/cuda/compat out of LD_LIBRARY_PATH, or update the driver.",
    ),
    999: (
        "the driver is in a bad state, often after the machine slept.",
        "sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm; if that does not help, reboot.",
    ),
}  # fmt: skip

_OTHER_CODE = (
    "CUDA does not start on this driver.",
    "nvidia-smi must work; reboot, and if that is no help reinstall it.",
)


def build(facts: Facts) -> Iterator[Finding]:
    torch, driver = facts.torch, _driver(facts)
    has = _major(driver)
    if not torch:
        return
    if torch.cuda is None:
        too_old = f"{CUDA_12}, for the driver {driver} is too old for CUDA 13."
        plain = "pip install --force-reinstall torch torchvision, from the registry as it is, without +cpu."
        yield problem(
            "torch-cpu-build", f"PyTorch {torch.version}, CUDA None",
            f"the installed PyTorch {torch.version} is built without CUDA: it can't use any GPU.",
            plain if has is None or has >= DRIVER_FOR[13] else too_old,
        )  # fmt: skip
        return
    needs = DRIVER_FOR.get(_major(torch.cuda) or 0)
    works = facts.gpu_count > 0  # by a 'compat' libcuda, on GPUs of data centres
    if needs is None or has is None or has >= needs or works:
        return
    how = _IN_WINDOWS if facts.system and facts.system.wsl else _HOW
    older = f"; or {CUDA_12}" if needs > DRIVER_FOR[12] <= has else ""
    yield problem(
        "driver-too-old", f"driver {driver}, PyTorch {torch.version} with CUDA {torch.cuda}",
        f"CUDA {torch.cuda}, which this PyTorch brings, needs a driver of version {needs} or later.",
        f"update the driver to {needs} or later ({how}), and reboot{older}.",
    )  # fmt: skip


def visible(facts: Facts) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES: CUDA reads it up to the first entry that it can't follow, and does not say so."""
    value = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return
    evidence = f"CUDA_VISIBLE_DEVICES={value!r}"
    entries = [entry.strip() for entry in value.strip().rstrip(",").split(",")]
    gpus = facts.driver_gpus
    # '' for what the driver does not tell: then no name can be said to be wrong
    known = [name for gpu in gpus for name in (gpu.uuid, *(gpu.slices or ("",) * gpu.mig))]
    unset = "unset CUDA_VISIBLE_DEVICES, or set it to what nvidia-smi -L lists"
    strange = next((e for e in entries if not re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", e)), None)
    beyond = next((e for e in entries if e.isdigit() and gpus and int(e) >= len(gpus)), None)
    by_name = [e for e in entries if e[:4] in ("GPU-", "MIG-") and gpus and all(known)]
    # CUDA takes the beginning of a UUID, if it is the beginning of one only
    lost = next((e for e in by_name if sum(uuid.startswith(e) for uuid in known) != 1), None)
    if entries[0] in ("", "-1"):
        cause = f"{evidence} hides every GPU."
        yield problem("cvd-hides-all", evidence, cause, "unset CUDA_VISIBLE_DEVICES")
    elif strange is not None:
        cause = (
            f"{strange!r} in {evidence} names no GPU: CUDA stops reading there, and hides that and the rest."
        )
        yield problem("cvd-invalid", evidence, cause, f"{unset}: numbers from 0, or UUIDs.")
    elif len(set(entries)) < len(entries):
        cause = f"{evidence} names a GPU twice, and then CUDA shows none."
        yield problem(
            "cvd-duplicate",
            evidence,
            cause,
            f"export CUDA_VISIBLE_DEVICES={','.join(dict.fromkeys(entries))}",
        )
    elif beyond is not None or lost is not None:
        cause = (
            f"{evidence} names {beyond or lost}, and this machine has {_have(len(gpus))}: CUDA hides that"
            " entry and all after it."
        )
        yield problem("cvd-out-of-range", f"{evidence}; {len(gpus)} GPUs", cause, f"{unset}.")
    elif (index := _index(facts.settings.device)) is not None and len(entries) <= index < len(gpus):
        cause = (
            f"{evidence} shows {len(entries)} of {len(gpus)} GPUs, counted from 0 anew, so"
            f" device=cuda:{index} is hidden."
        )
        yield problem(
            "cvd-hides-asked", evidence, cause, f"unset CUDA_VISIBLE_DEVICES, or say {_choice(len(entries))}."
        )
    elif gpus:
        yield ok("cvd", f"{evidence} shows {len(entries)} of {len(gpus)} GPUs")


def starts(facts: Facts) -> Iterator[Finding]:
    """cuInit, and what PyTorch makes of it."""
    cuda, torch_cuda = facts.cuda, facts.torch_cuda
    crashed = [failure.why for failure in facts.failures if failure.probe == "cuda" and not failure.hung]
    empty = [gpu for gpu in facts.driver_gpus if gpu.mig and not gpu.slices]
    works = facts.gpu_count > 0  # on a slice that NVML does not name, in a container
    if empty and len(empty) == len(facts.driver_gpus) and not works:
        yield problem(
            "mig-no-slices", f"MIG is on, without a slice: {comma_list([gpu.name for gpu in empty])}",
            "the GPU is in MIG mode and not divided yet, and CUDA only runs on slices.",
            f"sudo nvidia-smi -i {empty[0].index} -mig 0 (needs an idle GPU), or make slices: sudo"
            " nvidia-smi mig -cgi 0 -C",
        )  # fmt: skip
    elif cuda and cuda.code:
        cause, remedy = _CODES.get(cuda.code, _OTHER_CODE)
        yield problem(f"cuda-{cuda.code}", f"cuInit: {cuda.code} {cuda.error}; {cuda.library}", cause, remedy)
    elif crashed and not facts.gpu_count:
        yield problem(
            "cuda-crashes", crashed[0], "a process that starts CUDA on this machine comes to its end.",
            "take other CUDA folders out of LD_LIBRARY_PATH (unset LD_LIBRARY_PATH); then reinstall the"
            " driver.",
        )  # fmt: skip
    elif torch_cuda and torch_cuda.count == 0:
        counted = f"libcuda counts {cuda.count}" if cuda else "libcuda was not asked"
        yield problem(
            "cuda-unavailable", f"PyTorch counts 0 devices, {counted}: {torch_cuda.error or 'no error'}",
            f"PyTorch does not start CUDA: {torch_cuda.error or 'it counts no device'}.",
            "reinstall it: pip install --force-reinstall torch torchvision; take other CUDA folders out of"
            " LD_LIBRARY_PATH.",
        )  # fmt: skip


def asked_for(facts: Facts) -> Iterator[Finding]:
    """device=cuda:<index> among those that are shown."""
    index, torch_cuda = _index(facts.settings.device), facts.torch_cuda
    if index is not None and torch_cuda and index >= torch_cuda.count:
        cause = f"device={facts.settings.device} is not there: this machine has {_have(torch_cuda.count)}."
        yield problem(
            "no-such-device", f"PyTorch counts {torch_cuda.count}", cause, f"say {_choice(torch_cuda.count)}."
        )


def _driver(facts: Facts) -> str:
    """Its version, by NVML or by its kernel module."""
    return facts.driver_version or (facts.system.module if facts.system else "")


def _major(version: str) -> int | None:
    digits = re.match(r"\d+", version)
    return int(digits[0]) if digits else None


def _index(device: str) -> int | None:
    return int(device.removeprefix("cuda:")) if device.startswith("cuda:") else None


def _have(count: int) -> str:
    return {0: "no GPU", 1: "GPU 0 only"}.get(count, f"GPUs 0 to {count - 1}")


def _choice(count: int) -> str:
    return "device=cuda:0" if count == 1 else f"device=cuda:0 to device=cuda:{count - 1}"
