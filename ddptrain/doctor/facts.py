"""What doctor knows of a machine: plain values. The rules read them and nothing else, so a test can judge a
machine that nobody has."""

import dataclasses
from dataclasses import dataclass

from ddptrain.distributed.cpu import workers_of


@dataclass(frozen=True)
class Settings:
    """What the command line and torchrun say."""

    device: str = "auto"
    workers: int | None = None  # Loader processes of each rank; None: as many as training takes by itself
    port: int | None = None
    local_ranks: int | None = None  # Of this node; None: torchrun was not there to say
    under_torchrun: bool = False


@dataclass(frozen=True)
class System:
    """The machine and its NVIDIA parts as the kernel shows them. Asks no driver."""

    name: str = ""
    kind: str = "Linux"  # Linux, Darwin, Windows
    kernel: str = ""
    processor: str = ""  # x86_64, aarch64, ...
    python: str = ""
    ddptrain: str = ""
    container: str = ""
    """The sign by which it is known to be one: /.dockerenv, kubernetes, ...; '' where there is none."""
    wsl: bool = False
    dxg: bool = False  # /dev/dxg, by which Windows lends its GPU to WSL
    windows_libcuda: bool = False  # /usr/lib/wsl/lib/libcuda.so.1, which comes with the driver of Windows
    linux_libcuda: tuple[str, ...] = ()
    """Libraries of a Linux driver in the usual folders (looked for inside WSL only)."""
    device_nodes: tuple[str, ...] = ()  # /dev/nvidia*
    locked_nodes: tuple[str, ...] = ()  # Those of them that this user may not read and write
    pci_devices: int = 0  # Devices on the PCI bus of any make; 0: no bus to be seen from here
    nvidia_devices: tuple[str, ...] = ()  # NVIDIA's display and 3D controllers among them, by address
    module: str = ""  # Version of the NVIDIA kernel module that is loaded
    infiniband: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProcessLimits:
    """What this process may use."""

    machine_cores: int = 1
    affinity: int = 1  # Cores this process may run on
    quota: float | None = None  # Cores' worth of time its cgroup may take; None: no limit
    shm_total: int | None = None  # Bytes of /dev/shm; None: there is no such folder
    shm_free: int | None = None
    open_files: int | None = None  # The soft limit; None: no limit
    locked_memory: int | None = None  # Bytes; None: no limit

    @property
    def cores(self) -> int:
        """Cores there are to share out."""
        return max(1, min(self.affinity, int(self.quota) if self.quota is not None else self.affinity))


@dataclass(frozen=True)
class Port:
    number: int
    error: str = ""  # Why nothing can listen on it
    owner: str = ""  # Who does: name and pid, where that may be seen


@dataclass(frozen=True)
class GpuProcess:
    pid: int
    name: str  # '' where it is out of sight: another container's, or another user's
    bytes: int


@dataclass(frozen=True)
class DriverGpu:
    """One GPU as its driver describes it, in the driver's order. What the driver does not tell is as here."""

    index: int
    uuid: str = ""
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    memory: int = 0  # Bytes
    used: int = 0
    error: str = ""  # Why the driver does not reach it
    mode: str = "default"  # Compute mode: default, exclusive, prohibited
    mig: bool = False
    slices: tuple[str, ...] = ()  # UUIDs of its MIG slices
    processes: tuple[GpuProcess, ...] = ()
    slowed: tuple[str, ...] = ()  # heat, power: what holds its clock down now
    pcie_width: int | None = None
    pcie_most: int | None = None


@dataclass(frozen=True)
class Driver:
    """The answers of NVML, the driver's library for looking at GPUs."""

    version: str = ""
    error: str = ""
    code: int = 0  # NVML's error number
    gpus: tuple[DriverGpu, ...] = ()


@dataclass(frozen=True)
class Cuda:
    """The answers of libcuda, by which every CUDA program starts; no PyTorch in between."""

    library: str = ""  # The file that was loaded
    code: int = 0  # What cuInit returned
    error: str = ""
    version: int = 0  # The newest CUDA that this driver runs, as 13020 for 13.2
    count: int = 0  # Devices that CUDA_VISIBLE_DEVICES leaves


@dataclass(frozen=True)
class TorchGpu:
    index: int
    name: str
    capability: tuple[int, int]
    memory: int
    uuid: str = ""


@dataclass(frozen=True)
class Torch:
    """The PyTorch that is installed, as it was built."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    arch_list: tuple[str, ...] = ()
    nccl: str = ""
    cpu: str = ""  # The instructions its CPU kernels take: DEFAULT, AVX2, AVX512, ...
    cpu_features: tuple[str, ...] = ()


@dataclass(frozen=True)
class TorchCuda:
    """What PyTorch makes of the GPUs."""

    count: int = 0
    error: str = ""
    gpus: tuple[TorchGpu, ...] = ()
    cudnn: str = ""
    cudnn_error: str = ""
    strangers: tuple[tuple[int, int], ...] = ()  # Pairs of GPUs that can't read each other's memory


@dataclass(frozen=True)
class TorchVision:
    version: str = ""
    error: str = ""


@dataclass(frozen=True)
class Proof:
    """Something that was done on a device, and compared with what must come out."""

    name: str  # matrix product, convolution, training step, nms
    device: str
    dtype: str
    ok: bool
    said: str = ""  # The error against the bound, or what went wrong
    lacks: bool = False  # The device has no such numbers: nothing is wrong with it


@dataclass(frozen=True)
class Link:
    """An all-reduce by NCCL over some GPUs of this machine."""

    members: tuple[str, ...]
    megabytes: float = 0.0
    gb_per_s: float = 0.0
    """Per member and direction, 2 (n-1)/n of the bytes over the time: comparable between any numbers."""
    error: str = ""


@dataclass(frozen=True)
class AllReduce:
    """The all-reduce among all ranks of a job, as one of them has seen it."""

    node: str
    rank: int
    backend: str
    megabytes: float
    gb_per_s: float = 0.0  # As a link's
    error: str = ""
    hung: bool = False  # It has waited in vain, mostly for a rank that failed


@dataclass(frozen=True)
class ProbeFailure:
    """A question that was not answered."""

    probe: str
    why: str
    hung: bool = False


@dataclass(frozen=True)
class Facts:
    """Of one machine. None: that was not asked, or not answered (``failures`` says why)."""

    settings: Settings = Settings()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    system: System | None = None
    limits: ProcessLimits | None = None
    port: Port | None = None
    driver: Driver | None = None
    cuda: Cuda | None = None
    torch: Torch | None = None
    torch_cuda: TorchCuda | None = None
    torchvision: TorchVision | None = None
    proofs: tuple[Proof, ...] = ()
    links: tuple[Link, ...] = ()
    failures: tuple[ProbeFailure, ...] = ()

    @property
    def gpu_count(self) -> int:
        """Devices that PyTorch counts; 0 where it was not asked."""
        return self.torch_cuda.count if self.torch_cuda else 0

    @property
    def driver_gpus(self) -> tuple[DriverGpu, ...]:
        return self.driver.gpus if self.driver else ()

    @property
    def driver_version(self) -> str:
        return self.driver.version if self.driver else ""

    @property
    def ranks(self) -> int:
        """Of this node: as torchrun says, or one for each GPU that training would take."""
        several = self.settings.device in ("auto", "cuda")
        return self.settings.local_ranks or (self.gpu_count if several else 0) or 1

    @property
    def workers(self) -> int:
        """Loader processes of each rank."""
        if self.settings.workers is not None:
            return self.settings.workers
        cores = self.limits.cores if self.limits else 1
        return workers_of(cores // self.ranks, on_cpu=self.settings.device == "cpu" or not self.gpu_count)


@dataclass(frozen=True)
class Cluster:
    """The facts of all nodes of one job."""

    nodes: tuple[Facts, ...] = ()
    all_reduces: tuple[AllReduce, ...] = ()
    """The one among all, as each rank has seen it; none where there is one rank."""
