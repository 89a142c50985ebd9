"""The rest of the machine: what makes a run fail or crawl whatever its device."""

from collections.abc import Iterator

from ddptrain.distributed.cpu import threads_of
from ddptrain.doctor.facts import Facts
from ddptrain.doctor.findings import Finding, comma_list, gib, ok, problem, warning
from ddptrain.text import counted

_A_WORKER = 128 * 2**20
"""Bytes of /dev/shm: two batches of about 64 MiB, say 100 pictures of 3x224x224 in float32."""
_DOCKER = 64 * 2**20  # Bytes of /dev/shm that Docker and Kubernetes give
_FILES, _FILES_A_WORKER = 512, 64
"""Descriptors: a process's own, and two batches of up to 30 tensors from each worker."""
_LOCKED = 2**30
"""Bytes that NCCL may want to keep in place, amply."""
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": (None, "the host waits for every kernel"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "every tensor is allocated by the driver"),
    "NCCL_P2P_DISABLE": (None, "GPUs of one machine talk by way of the host"),
    "NCCL_SHM_DISABLE": (None, "GPUs of one machine may talk over the network"),
    "NCCL_IB_DISABLE": (None, "nodes talk over sockets, not InfiniBand"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked (DETAIL)"),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("1", "copies and kernels queue up behind each other (1)"),
}
"""Variables that slow a run down: the value that does (None: any but '' and 0), and how."""


def torch_imports(facts: Facts) -> Iterator[Finding]:
    for failure in facts.failures:
        if failure.probe == "torch":
            yield problem(
                "torch-import", failure.why, "PyTorch can't be imported.",
                "pip install --force-reinstall torch torchvision; no file or folder named torch may lie"
                " beside the command, and LD_LIBRARY_PATH should be empty.",
            )  # fmt: skip


def torchvision(facts: Facts) -> Iterator[Finding]:
    vision, torch = facts.torchvision, facts.torch
    if not vision or not torch:
        return
    both = f"torch {torch.version}, torchvision {vision.version or 'not installed'}"
    missing = "No module named 'torchvision'" in vision.error
    if missing:
        cause, remedy = "torchvision is not installed.", "pip install torchvision, from where torch came."
        yield problem("torchvision-missing", vision.error, cause, remedy)
    elif vision.error:
        yield problem(
            "torchvision-mismatch", f"{both}: {vision.error}",
            "torchvision was built for another PyTorch, so its own operators don't load (operator"
            " torchvision::nms does not exist): the two come from different places, or only one was updated.",
            "install the two together, from one index: pip install --force-reinstall torch torchvision"
            " (pairs: 2.15 with 0.29, 2.11 with 0.26).",
        )  # fmt: skip
    else:
        yield ok("torchvision", f"{both}: nms works")


def cpu(facts: Facts) -> Iterator[Finding]:
    torch, system, limits = facts.torch, facts.system, facts.limits
    if not torch or not system or not limits:
        return
    x86 = system.processor in ("x86_64", "AMD64")
    features = comma_list(torch.cpu_features)
    evidence = f"{counted(limits.cores, 'core')} with {features}; PyTorch's kernels: {torch.cpu}"
    forced = facts.environment.get("ATEN_CPU_CAPABILITY")
    if x86 and forced and torch.cpu in ("DEFAULT", "NO AVX"):
        yield warning(
            "cpu-forced-slow", f"{evidence}; ATEN_CPU_CAPABILITY={forced}",
            "ATEN_CPU_CAPABILITY keeps PyTorch from the CPU's vector instructions.",
            "unset ATEN_CPU_CAPABILITY",
        )  # fmt: skip
    elif x86 and "AVX2" not in torch.cpu_features:
        yield warning(
            "cpu-no-avx2", evidence,
            "this CPU has no AVX2, or its virtual machine hides it: on the CPU all is slow.",
            "give the virtual machine the host's CPU (QEMU: -cpu host), or take another machine.",
        )  # fmt: skip
    else:
        yield ok("cpu", evidence)


def cores(facts: Facts) -> Iterator[Finding]:
    """Ranks, their loaders and their threads against the cores."""
    limits, ranks = facts.limits, facts.ranks
    if not limits:
        return
    omp = facts.environment.get("OMP_NUM_THREADS", "")
    set_by_torchrun = (
        omp == "1" and facts.settings.under_torchrun
    )  # torchrun sets it, and training goes by the cores
    threads = threads_of(limits.cores // ranks, facts.workers)
    if omp.isdigit() and not set_by_torchrun:
        threads = int(omp)
    need = ranks * max(threads, facts.workers + 1)
    quota = f", a quota of {limits.quota:g}" if limits.quota is not None else ""
    evidence = (
        f"{counted(limits.machine_cores, 'core')}, {limits.affinity} by affinity{quota};"
        f" {counted(ranks, 'rank')} of {counted(threads, 'thread')} and {counted(facts.workers, 'worker')}"
    )
    fits = max(1, limits.cores // ranks)
    share = f"export OMP_NUM_THREADS={fits}, and data.workers={fits - 1}"
    if ranks > limits.cores:
        yield warning(
            "oversubscribed", evidence,
            f"{ranks} ranks share {counted(limits.cores, 'core')}, and wait for each other.",
            f"start {counted(limits.cores, 'rank')} (--nproc-per-node={limits.cores}), or give the job more"
            " cores"
            " (SLURM: --cpus-per-task; docker: --cpus).",
        )  # fmt: skip
    elif limits.cores < limits.affinity and need > limits.cores:
        yield warning(
            "cpu-quota", evidence,
            f"the container may use the time of {limits.quota:g} cores and sees {limits.affinity}: as many"
            " threads"
            " start, and stop each other.",
            f"{share}; or give the container more CPU.",
        )  # fmt: skip
    elif need > limits.cores:
        yield warning(
            "oversubscribed", evidence,
            f"{need} threads or workers share {counted(limits.cores, 'core')}, and wait for each other.",
            f"{share}.",
        )  # fmt: skip
    else:
        yield ok("cores", evidence)


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """Workers hand their batches over in /dev/shm, NCCL and gloo's ranks on one node too."""
    limits = facts.limits
    if not limits or limits.shm_total is None or limits.shm_free is None:
        return
    workers = facts.workers * facts.ranks
    need = workers * _A_WORKER
    evidence = (
        f"/dev/shm {gib(limits.shm_total)}, {gib(limits.shm_free)} free, for {counted(workers, 'worker')}"
    )
    remedy = (
        f"docker run --shm-size={max(1, -(-need // 2**30))}g (or --ipc=host); Kubernetes: an emptyDir with"
        " medium: Memory at /dev/shm; else sudo mount -o remount,size=8G /dev/shm; data.workers=0 needs none."
    )
    if workers and limits.shm_free < limits.shm_total // 2 and limits.shm_free < need:
        cause = "/dev/shm is full of files that something has left: a worker ends with 'Bus error'."
        yield problem(
            "shm-full", evidence, cause, f"ls -lt /dev/shm, and remove what no process uses; or {remedy}"
        )
    elif workers and limits.shm_total <= _DOCKER:
        cause = (
            "/dev/shm is as small as Docker makes it: a worker that hands over a batch ends with 'Bus error'."
        )
        yield problem("shm-small", evidence, cause, remedy)
    elif limits.shm_free < need:
        cause = f"/dev/shm may be too small: for large batches {workers} workers take {gib(need)} of it."
        yield warning("shm-small", evidence, cause, remedy)
    else:
        yield ok("shm", evidence)


def open_files(facts: Facts) -> Iterator[Finding]:
    limit = facts.limits.open_files if facts.limits else None
    if limit is None:
        return
    need = _FILES + _FILES_A_WORKER * facts.workers
    if limit < need:
        yield warning(
            "open-files", f"{limit} for {facts.workers} workers a rank",
            f"a process may open {limit} files, and every tensor from a worker is one: 'Too many open"
            " files', or 'received 0 items of ancdata'.",
            f"ulimit -n {max(4096, need)} before the start (docker: --ulimit nofile={max(4096, need)}).",
        )  # fmt: skip
    else:
        yield ok("open-files", f"a process may open {limit}")


def locked_memory(facts: Facts) -> Iterator[Finding]:
    """RDMA pins its buffers."""
    limits, system = facts.limits, facts.system
    if not limits or not system or not system.infiniband or limits.locked_memory is None:
        return
    if limits.locked_memory < _LOCKED:
        yield warning(
            "locked-memory", f"{gib(limits.locked_memory)}; InfiniBand: {comma_list(system.infiniband)}",
            "InfiniBand needs memory that stays in place, and this process may lock little: NCCL fails with"
            " 'Cannot allocate memory'.",
            "ulimit -l unlimited (docker: --ulimit memlock=-1; SLURM:"
            " PropagateResourceLimitsExcept=MEMLOCK).",
        )  # fmt: skip


def port(facts: Facts) -> Iterator[Finding]:
    port = facts.port
    if not port:
        return
    if port.error:
        level = problem if facts.settings.port is not None else warning  # nobody may want torchrun's own
        owner = f" by {port.owner}" if port.owner else ""
        yield level(
            "port-in-use", f"port {port.number}: {port.error}{owner}",
            f"port {port.number}{'' if facts.settings.port else ', which torchrun takes by itself,'} is in"
            f" use{owner}.",
            "one node: torchrun --standalone ..., which takes a free one; several:"
            " --rdzv-endpoint=<host>:<another port>.",
        )  # fmt: skip
    else:
        yield ok("port", f"{port.number} is free")


def settings(facts: Facts) -> Iterator[Finding]:
    """Variables that slow a run down, mostly left over from a hunt for an error."""
    if facts.settings.device == "cpu":
        return
    slowing = []
    for name, value in facts.environment.items():
        slow_value, _ = _SLOW.get(name, ("", ""))
        if value not in ("", "0") and slow_value in (None, value):
            slowing.append(name)
    if slowing:
        evidence = comma_list([f"{name}={facts.environment[name]}" for name in slowing])
        cause = f"{comma_list([f'{name}: {_SLOW[name][1]}' for name in slowing])}."
        yield warning(
            "slow-settings", evidence, cause, f"unset {' '.join(slowing)}, unless they are needed here."
        )


def unanswered(facts: Facts) -> Iterator[Finding]:
    """Questions that no other rule reports."""
    elsewhere = {"torch", "nvml", "cuda", "all-reduce", "proof"}
    elsewhere |= {"torchvision"} if facts.torchvision else set()
    for failure in facts.failures:
        if failure.probe not in elsewhere:
            yield warning(
                "no-answer", f"{failure.probe}: {failure.why}",
                f"doctor could not find out about {failure.probe}, and goes on without.",
                "please report this, with python -m ddptrain doctor --json.",
            )  # fmt: skip
