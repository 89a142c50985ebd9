"""Is there a GPU, and does its driver answer? Each group follows from the one before."""

from collections.abc import Iterator

from ddptrain.doctor.facts import Facts
from ddptrain.doctor.findings import Finding, comma_list, problem, warning

_GIVE_GPUS = (
    "start the container with its GPUs: docker run --gpus all ...; podman run --device nvidia.com/gpu=all"
    " ...; apptainer exec --nv ...; in Kubernetes resources: {limits: {nvidia.com/gpu: 1}}."
)
_INSTALL = (
    "install the driver: sudo ubuntu-drivers install (Ubuntu), sudo apt install nvidia-driver (Debian),"
    " sudo dnf install nvidia-driver-cuda (Fedora, RHEL); then reboot. nvidia-smi must then list the GPU."
)
LOOK = "sudo dmesg | grep -iE 'nvrm|xid' tells what happened"


def no_cuda_here(facts: Facts) -> Iterator[Finding]:
    """Systems and builds that have no CUDA at all."""
    system, torch = facts.system, facts.torch
    if system and system.kind == "Darwin":
        level = problem if facts.settings.device.startswith("cuda") else warning
        yield level(
            "macos", "the system is macOS", "macOS has no CUDA: NVIDIA's GPUs can't be used there.",
            "say device=mps for the GPU of an Apple machine; device=auto takes it for a single rank.",
        )  # fmt: skip
    elif torch and torch.hip:
        yield warning(
            "rocm-build", f"PyTorch {torch.version}, ROCm {torch.hip}",
            "this PyTorch is built for AMD's GPUs, and doctor knows NVIDIA's only: it has looked at the"
            " host.",
            "rocminfo lists AMD's GPUs.",
        )  # fmt: skip


def wsl(facts: Facts) -> Iterator[Finding]:
    """Windows' own driver serves WSL; a second one inside it does harm."""
    system = facts.system
    if not system or not system.wsl:
        return
    if not (system.dxg and system.windows_libcuda):
        parts = {"/dev/dxg": system.dxg, "/usr/lib/wsl/lib/libcuda.so.1": system.windows_libcuda}
        lacking = comma_list([part for part, is_there in parts.items() if not is_there])
        yield problem(
            "wsl-no-driver", f"WSL without {lacking}",
            "inside WSL the driver of Windows serves the GPU, and Windows lends none: its NVIDIA driver is"
            " missing or old, or this is WSL 1.",
            "install the NVIDIA driver in Windows (none inside WSL), then in Windows: wsl --update, and"
            " wsl --shutdown; wsl -l -v must say version 2.",
        )  # fmt: skip
    elif system.linux_libcuda:
        yield problem(
            "wsl-linux-driver", comma_list(system.linux_libcuda),
            "a Linux driver is installed inside WSL, and its libcuda is found in place of the one that"
            " Windows lends (/usr/lib/wsl/lib).",
            "remove it: sudo apt purge 'nvidia-driver-*' 'libnvidia-compute-*'; then wsl --shutdown in"
            " Windows.",
        )  # fmt: skip


def device_nodes(facts: Facts) -> Iterator[Finding]:
    """The files by which a process reaches a GPU, where it does not: some machines have other ones."""
    system = facts.system
    if not system or system.wsl or system.kind != "Linux" or facts.gpu_count:
        return
    nodes, module = system.device_nodes, f"kernel module {system.module or 'not loaded'}"
    if "/dev/nvidiactl" not in nodes:
        yield _no_node(facts)
    elif not any(node.removeprefix("/dev/nvidia").isdigit() for node in nodes):
        if system.container:
            cause, remedy = "this container was given the driver but none of the GPUs.", _GIVE_GPUS
        else:
            cause = "the driver is loaded and has found no GPU that it can run, or nobody made its node."
            remedy = f"sudo nvidia-modprobe -u -c=0; if nvidia-smi still lists none, {LOOK}."
        yield problem("no-gpu-node", f"{comma_list(nodes)}; {module}", cause, remedy)
    elif system.locked_nodes:
        yield problem(
            "device-node-locked", f"not readable and writable: {comma_list(system.locked_nodes)}",
            "this user may not open the GPU's device nodes.",
            f"ls -l {system.locked_nodes[0]} shows their group: sudo usermod -aG <group> $USER, and log in"
            " anew; under SLURM ask for a GPU (--gres=gpu:1).",
        )  # fmt: skip


def _no_node(facts: Facts) -> Finding:
    system = facts.system
    assert system is not None
    here = "there is no NVIDIA device node (/dev/nvidiactl): "
    on_bus = f"{len(system.nvidia_devices)} by NVIDIA" if system.nvidia_devices else "none by NVIDIA"
    evidence = f"no /dev/nvidiactl; on the PCI bus {system.pci_devices} devices, {on_bus}"
    if system.nvidia_devices and not system.container:
        if system.module:
            cause = f"{here}a GPU and the kernel module {system.module} are there, but nobody made the nodes."
            return problem("no-device-node", evidence, cause, "sudo nvidia-modprobe -u -c=0")
        cause = f"{here}there is a GPU ({comma_list(system.nvidia_devices)}), but no NVIDIA driver is loaded."
        return problem("no-driver", evidence, cause, _INSTALL)
    if system.container and (system.nvidia_devices or not system.pci_devices):
        cause = f"{here}this is a container ({system.container}) that was started without GPUs."
        return problem("container-without-gpus", evidence, cause, _GIVE_GPUS)
    why = (
        "for its PCI bus shows nothing by NVIDIA." if system.pci_devices else "or none that the kernel shows."
    )
    return problem(
        "no-gpu", evidence, f"{here}no GPU in this machine, {why}",
        "take a machine with an NVIDIA GPU (under SLURM: --gres=gpu:1), or train on the CPU with device=cpu.",
    )  # fmt: skip


def driver_answers(facts: Facts) -> Iterator[Finding]:
    """NVML and libcuda, which come with the driver."""
    hung = [failure.probe for failure in facts.failures if failure.hung and failure.probe in ("nvml", "cuda")]
    driver, cuda = facts.driver, facts.cuda
    code = driver.code if driver else 0
    module = facts.system.module if facts.system else ""
    silent = _silent(facts)
    if hung:
        yield problem(
            "driver-hangs", f"no answer from {comma_list(hung)}",
            "the driver hangs: a GPU of it has failed, or resets.",
            f"{LOOK}; then reboot. nvidia-smi will hang as well.",
        )  # fmt: skip
    elif driver and code == 18:
        yield problem(
            "nvml-mismatch", f"NVML: {driver.error}; kernel module {module or 'unknown'}",
            "the driver was updated, and the kernel still runs the module of the old one.",
            "reboot; or, with nothing on the GPU: sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia &&"
            " sudo modprobe nvidia. In a container it is the host that needs this.",
        )  # fmt: skip
    elif driver and code == 9:
        yield problem(
            "driver-not-loaded", f"NVML: {driver.error}",
            "the driver is installed, but its kernel module is not loaded.",
            "sudo modprobe nvidia; where that fails after a kernel update: sudo dkms autoinstall, or"
            " reinstall the driver (Secure Boot refuses a module that is not signed: mokutil --sb-state).",
        )  # fmt: skip
    elif driver and (code == 15 or (silent and not facts.gpu_count)):
        yield problem(
            "gpu-lost", f"NVML: {driver.error or silent}", "a GPU has fallen off the bus.",
            f"{LOOK} (Xid 79); reboot, and if it comes again look at its power and its seat.",
        )  # fmt: skip
    elif cuda and not cuda.library:
        yield problem(
            "no-libcuda", cuda.error, "the driver's library libcuda.so.1 is not to be found.",
            "in a container: set NVIDIA_DRIVER_CAPABILITIES=compute,utility (docker: -e ...), or start it"
            " with --gpus all; else reinstall the driver, then sudo ldconfig.",
        )  # fmt: skip


def _silent(facts: Facts) -> str:
    """What NVML says where it counts GPUs and reaches none; ''."""
    errors = [gpu.error for gpu in facts.driver_gpus]
    return errors[0] if errors and all(errors) else ""


def nvml_quiet(facts: Facts) -> Iterator[Finding]:
    """NVML does not answer where CUDA works: what it would have reported is missing."""
    why = [failure.why for failure in facts.failures if failure.probe == "nvml" and not failure.hung]
    if error := (facts.driver.error if facts.driver else "") or _silent(facts):
        why = [error]
    if why:
        yield warning(
            "nvml-quiet", why[0],
            "NVML does not answer: memory in use, MIG, compute mode and heat are not known.",
            "pip install nvidia-ml-py where it is missing; in a container"
            " NVIDIA_DRIVER_CAPABILITIES=compute,utility.",
        )  # fmt: skip
