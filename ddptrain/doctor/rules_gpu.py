"""A GPU that CUDA runs: does this PyTorch compute on it, is it free, and how fast do several talk?"""

import re
from collections.abc import Iterator

from ddptrain.doctor.facts import DriverGpu, Facts, Link, TorchGpu
from ddptrain.doctor.findings import Finding, comma_list, gib, ok, problem, warning
from ddptrain.doctor.rules_cuda import CUDA_12
from ddptrain.doctor.rules_presence import LOOK

_FULL, _HALF = 0.9, 0.2  # Of a GPU's memory, taken by others: nothing fits any more; less fits
_SLOW_PAIR = 0.25  # Of the fastest pair's speed: another kind of wire
_NCCL = "NCCL_DEBUG=INFO python -m ddptrain doctor shows where it stops"


def kernels(facts: Facts) -> Iterator[Finding]:
    """Machine code runs on its own major version from its minor on; PTX (compute_*) on everything newer."""
    torch, torch_cuda = facts.torch, facts.torch_cuda
    if not torch or not torch_cuda or not torch.arch_list:
        return
    lacking = [
        gpu for gpu in torch_cuda.gpus if not any(_runs(arch, gpu.capability) for arch in torch.arch_list)
    ]
    fine = [str(gpu.index) for gpu in torch_cuda.gpus if gpu not in lacking]
    if not lacking:
        return
    newest = max(_capability(arch) for arch in torch.arch_list)
    named = comma_list([f"{gpu.name} ({_sm(gpu)})" for gpu in lacking])
    is_new = lacking[0].capability > newest
    remedy = "pip install --upgrade torch torchvision" if is_new else CUDA_12
    without = f"; or leave it out: export CUDA_VISIBLE_DEVICES={','.join(fine)}" if fine else ""
    yield problem(
        "no-kernel", f"{named}; PyTorch {torch.version} has {' '.join(torch.arch_list)}",
        f"this PyTorch has no machine code for {named}: it is {'newer' if is_new else 'older'} than the"
        " build.",
        f"{remedy}{without}.",
    )  # fmt: skip


def cudnn(facts: Facts) -> Iterator[Finding]:
    torch_cuda = facts.torch_cuda
    if not torch_cuda:
        return
    if torch_cuda.cudnn_error:
        paths = facts.environment.get("LD_LIBRARY_PATH", "")
        yield problem(
            "cudnn-mismatch", f"{torch_cuda.cudnn_error}; LD_LIBRARY_PATH={paths}",
            "another cuDNN is loaded than the one that PyTorch was built with and brings along.",
            "unset LD_LIBRARY_PATH; if that is no help: pip install --force-reinstall torch torchvision.",
        )  # fmt: skip
    elif not torch_cuda.cudnn:
        yield problem(
            "cudnn-missing", "PyTorch finds no cuDNN",
            "convolutions need cuDNN, and its library is not there.",
            "pip install --force-reinstall torch torchvision, which brings it.",
        )  # fmt: skip


def compute_mode(facts: Facts) -> Iterator[Finding]:
    gpus = visible_gpus(facts)
    barred = [str(gpu.index) for gpu in gpus if gpu.mode == "prohibited"]
    taken = [gpu for gpu in gpus if gpu.mode == "exclusive" and gpu.processes]
    if barred:
        yield problem(
            "compute-prohibited", f"GPU {', '.join(barred)}: compute mode PROHIBITED",
            f"no program may compute on GPU {', '.join(barred)}: its compute mode is PROHIBITED.",
            f"sudo nvidia-smi -i {','.join(barred)} -c DEFAULT",
        )  # fmt: skip
    if taken:
        who = comma_list([f"GPU {gpu.index} by {_who(gpu)}" for gpu in taken])
        indices = ",".join(str(gpu.index) for gpu in taken)
        pids = " ".join(str(gpu.processes[0].pid) for gpu in taken)
        yield problem(
            "compute-exclusive", f"compute mode EXCLUSIVE_PROCESS: {who}",
            f"the GPU takes one process only (compute mode EXCLUSIVE_PROCESS), and it is taken: {who}.",
            f"wait for that one, or end it (kill {pids}), or allow several: sudo nvidia-smi -i {indices} -c"
            " DEFAULT",
        )  # fmt: skip


def memory(facts: Facts) -> Iterator[Finding]:
    gpus = visible_gpus(facts)
    taken = [gpu for gpu in gpus if gpu.memory and gpu.used > _HALF * gpu.memory]
    for gpu in taken:
        evidence = f"GPU {gpu.index} {gpu.name}: {gib(gpu.used)} of {gib(gpu.memory)} in use"
        cause = f"{gib(gpu.used)} of GPU {gpu.index}'s {gib(gpu.memory)} are taken by {_who(gpu)}."
        others = [str(other.index) for other in gpus if other not in taken]
        elsewhere = f"; or take another GPU: export CUDA_VISIBLE_DEVICES={','.join(others)}" if others else ""
        pids = " ".join(str(process.pid) for process in gpu.processes)
        find = f"sudo fuser -v /dev/nvidia{gpu.index} names who holds it"
        end = f"kill {pids}, if it is yours" if pids else find
        level = problem if gpu.used > _FULL * gpu.memory else warning
        yield level("memory-taken", evidence, cause, f"{end}{elsewhere}.")


def mig(facts: Facts) -> Iterator[Finding]:
    divided = [gpu for gpu in visible_gpus(facts) if gpu.mig]
    ranks = facts.settings.local_ranks or 1
    if divided:
        level = problem if ranks > 1 else warning
        yield level(
            "mig", f"MIG is on: {comma_list([f'{gpu.name} in {len(gpu.slices)} slices' for gpu in divided])}",
            "CUDA gives a process one slice of a divided GPU, and NCCL can't join slices of one GPU.",
            f"train on one slice with one rank{' instead of ' + str(ranks) if ranks > 1 else ''}, or undo"
            f" it on an idle GPU: sudo nvidia-smi -i {divided[0].index} -mig 0",
        )  # fmt: skip


def silent(facts: Facts) -> Iterator[Finding]:
    """One of several that the driver does not reach."""
    gpus = facts.driver_gpus
    for gpu in gpus:
        if gpu.error and not all(other.error for other in gpus):
            yield warning(
                "gpu-silent", f"GPU {gpu.index}: {gpu.error}",
                f"the driver does not reach GPU {gpu.index}, of those that it counts: nothing can be trained"
                " on it.",
                f"{LOOK}; reboot, and if it comes again look at its power and its seat.",
            )  # fmt: skip


def speed(facts: Facts) -> Iterator[Finding]:
    """What holds a GPU down, as the driver sees it now."""
    for gpu in visible_gpus(facts):
        if gpu.slowed:
            yield warning(
                "slowed-down", f"GPU {gpu.index} {gpu.name}: {comma_list(gpu.slowed)}",
                f"GPU {gpu.index} runs below its clock, because of {comma_list(gpu.slowed)}.",
                f"look at its fans, its air and its power cable; nvidia-smi -i {gpu.index} -q -d"
                " PERFORMANCE,TEMPERATURE",
            )  # fmt: skip
        if gpu.pcie_width and gpu.pcie_most and gpu.pcie_width < gpu.pcie_most:
            yield warning(
                "pcie-narrow", f"GPU {gpu.index} {gpu.name}: x{gpu.pcie_width} of x{gpu.pcie_most}",
                f"GPU {gpu.index} is joined by {gpu.pcie_width} of {gpu.pcie_most} PCIe lanes: batches come"
                " slower.",
                "move it to a slot with all lanes, or seat it anew; data.resident=true copies the data once.",
            )  # fmt: skip


def ranks(facts: Facts) -> Iterator[Finding]:
    count = facts.gpu_count
    local_ranks = facts.settings.local_ranks or 1
    if 0 < count < local_ranks:
        yield warning(
            "ranks-over-gpus", f"{local_ranks} ranks on this node, {count} GPUs",
            "several ranks share a GPU: they take turns, over gloo, for NCCL refuses it.",
            f"start as many as there are GPUs: torchrun --standalone --nproc-per-node={count} -m ddptrain"
            " ...",
        )  # fmt: skip


def nccl(facts: Facts) -> Iterator[Finding]:
    """Several GPUs, and what goes between them."""
    torch, torch_cuda = facts.torch, facts.torch_cuda
    if not torch or not torch_cuda or torch_cuda.count < 2:
        return
    if not torch.nccl:
        yield problem(
            "nccl-missing", f"PyTorch {torch.version} without NCCL, {torch_cuda.count} GPUs",
            "this PyTorch is built without NCCL, over which the GPUs add up their gradients.",
            "pip install --force-reinstall torch torchvision",
        )  # fmt: skip
        return
    ended = [failure for failure in facts.failures if failure.probe == "all-reduce"]
    hung = [failure for failure in ended if failure.hung]
    if hung:
        yield problem(
            "all-reduce-hangs", hung[0].why, "an all-reduce over the GPUs of this machine did not end.",
            f"{_NCCL}; NCCL_P2P_DISABLE=1 tells whether the GPUs' direct way is at fault (then switch off ACS"
            " and the IOMMU in the BIOS).",
        )  # fmt: skip
    elif ended:
        yield from _links((Link(("all GPUs",), error=ended[0].why),), f"NCCL {torch.nccl}")
    yield from _links(facts.links, f"NCCL {torch.nccl}")
    if torch_cuda.strangers and not ended:
        yield warning(
            "no-peer-access", f"no peer access: {comma_list([f'{a}-{b}' for a, b in torch_cuda.strangers])}",
            "these GPUs can't read each other's memory, so gradients go by way of the host.",
            "on GeForce nothing can be done; on others switch off ACS and the IOMMU in the BIOS;"
            " strategy.compression=bf16 halves what is sent.",
        )  # fmt: skip


def _links(links: tuple[Link, ...], named: str) -> Iterator[Finding]:
    """All-reduces that were done."""
    broken = [link for link in links if link.error]
    pairs = [link for link in links if len(link.members) == 2 and not link.error]
    fastest = max((link.gb_per_s for link in pairs), default=0.0)
    slow = [link for link in pairs if link.gb_per_s < _SLOW_PAIR * fastest]
    if broken:
        yield problem(
            "all-reduce-fails", f"{named}: {broken[0].error}",
            f"the all-reduce over {'-'.join(broken[0].members)} failed, so gradients can't be added up.",
            f"{_NCCL}; with several networks name one: NCCL_SOCKET_IFNAME=<interface of ip -br addr>.",
        )  # fmt: skip
    if slow:
        slow_speeds = comma_list([f"{'-'.join(link.members)} {link.gb_per_s:.2f} GB/s" for link in slow])
        yield warning(
            "slow-pair", f"{slow_speeds}; the fastest pair {fastest:.2f} GB/s",
            "some go by a much slower way than others, and every step waits for the slowest.",
            "nvidia-smi topo -m shows the wires: start the ranks on GPUs of one group"
            " (CUDA_VISIBLE_DEVICES).",
        )  # fmt: skip
    speeds = [f"{'-'.join(link.members)} {link.gb_per_s:.2f} GB/s" for link in links if not link.error]
    if speeds:
        yield ok("all-reduce", f"{named}, {links[0].megabytes:.0f} MB: {comma_list(speeds)}")


def usable_gpus(facts: Facts) -> Iterator[Finding]:
    torch, torch_cuda = facts.torch, facts.torch_cuda
    if torch and torch_cuda:
        driver = facts.driver_version or "unknown"
        stack = f"driver {driver}, CUDA {torch.cuda}, cuDNN {torch_cuda.cudnn}, NCCL {torch.nccl}"
        for gpu in torch_cuda.gpus:
            yield ok("gpu", f"cuda:{gpu.index} {gpu.name}, {_sm(gpu)}, {gib(gpu.memory)}; {stack}")


def visible_gpus(facts: Facts) -> list[DriverGpu]:
    """The driver's GPUs that CUDA_VISIBLE_DEVICES leaves: CUDA numbers them anew, so by UUID; and of them the
    one that was asked for."""
    gpus = facts.driver_gpus
    torch_gpus = facts.torch_cuda.gpus if facts.torch_cuda else ()
    index = facts.settings.device.removeprefix("cuda:")
    wanted = [gpu for gpu in torch_gpus if not index.isdigit() or gpu.index == int(index)]
    uuids = [gpu.uuid.removeprefix("GPU-") for gpu in wanted if gpu.uuid]
    if len(uuids) < len(wanted) or not uuids or not any(gpu.uuid for gpu in gpus):  # UUIDs are not known
        return list(gpus)
    whole = [gpu for gpu in gpus if gpu.uuid.removeprefix("GPU-") in uuids]
    # an instance of a divided GPU has a UUID of its own
    divided = [gpu for gpu in gpus if gpu.mig and gpu not in whole] if len(whole) < len(uuids) else []
    return [gpu for gpu in gpus if gpu in whole or gpu in divided]


def _who(gpu: DriverGpu) -> str:
    processes = [f"pid {p.pid} ({p.name or 'name unknown'}, {gib(p.bytes)})" for p in gpu.processes]
    unseen = "a process that can't be seen from here (another container, or a dead one)"
    return comma_list(processes) if processes else unseen


def _sm(gpu: TorchGpu) -> str:
    return f"sm_{gpu.capability[0]}{gpu.capability[1]}"


def _capability(arch: str) -> tuple[int, int]:
    digits = re.sub(r"\D", "", arch)
    return int(digits[:-1]), int(digits[-1])


def _runs(arch: str, on: tuple[int, int]) -> bool:
    major, minor = _capability(arch)
    if arch[-1] == "a":  # that architecture and no other
        return (major, minor) == on
    return (major, minor) <= on if arch.startswith("compute_") else major == on[0] and minor <= on[1]
