"""The verb ``doctor``: why is my GPU not used, or slow?"""

import os
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace

from ddptrain.doctor.examine import examine, gpu_findings
from ddptrain.doctor.facts import AllReduce, Cluster, Facts, Settings
from ddptrain.doctor.findings import problems
from ddptrain.doctor.probes import collect, probes
from ddptrain.doctor.rules_cluster import examine_cluster, name_of
from ddptrain.doctor.show import header, json_of, print_cluster, show
from ddptrain.errors import ExitCode, UserError
from ddptrain.keys import did_you_mean

_SETTINGS = ("device", "workers", "port")
_DEVICES = re.compile(r"auto|cpu|cuda|cuda:\d+")


def run(settings: Mapping[str, str], as_json: bool, cluster: bool) -> int:
    """Ask, judge, print. Returns 1 where there is a problem, else 0; raises UserError for wrong words."""
    parsed = _parse(settings, cluster)
    if cluster:
        return _examine_cluster(parsed, as_json)
    return _report(collect(parsed, probes(parsed)), as_json)


def _parse(settings: Mapping[str, str], cluster: bool) -> Settings:
    for name, value in settings.items():
        if name not in _SETTINGS:
            known = ", ".join(f"{known_name}=" for known_name in _SETTINGS)
            raise UserError(f"{name}={value}: doctor takes {known} only.{did_you_mean(name, _SETTINGS)}")
    device = settings.get("device", "auto")
    if not _DEVICES.fullmatch(device):
        raise UserError(f"device={device}: must be auto, cpu, cuda or cuda:<index>.")
    if not cluster and "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError(
            "doctor: under torchrun every rank would say the same. Add --cluster, or start it by itself:"
            " python -m ddptrain doctor"
        )
    if cluster and "RANK" not in os.environ:
        raise UserError(
            "--cluster: asks the nodes of a job, and torchrun starts one. On each node type: torchrun"
            " --nnodes=<nodes> --nproc-per-node=<ranks> --rdzv-backend=c10d --rdzv-id=doctor"
            " --rdzv-endpoint=<first node>:29500 -m ddptrain doctor --cluster (on one node: torchrun"
            " --standalone --nproc-per-node=2 -m ddptrain doctor --cluster)."
        )
    workers, port = _number("workers", settings, 0, 1024), _number("port", settings, 1, 65535)
    return Settings(device=device, workers=workers, port=port, under_torchrun=cluster)


def _number(name: str, settings: Mapping[str, str], least: int, most: int) -> int | None:
    if name not in settings:
        return None
    text = settings[name]
    if not text.isdecimal() or not least <= int(text) <= most:
        raise UserError(f"{name}={text}: must be a whole number from {least} to {most}.")
    return int(text)


def _examine_cluster(settings: Settings, as_json: bool) -> int:
    """As one rank of all: each node's first asks its machine, and rank 0 judges and prints."""
    from ddptrain.distributed import comm
    from ddptrain.distributed.world import world_from_environment
    from ddptrain.doctor.all_reduce import measure_all_reduce

    world = world_from_environment()
    settings = replace(settings, local_ranks=world.local_size)
    own = collect(settings, probes(settings)) if world.is_first_on_node else None
    try:
        comm.open_group(world, even_single=True)
    except RuntimeError as error:
        raise UserError(
            f"--cluster: rank {world.rank} does not reach the others: {str(error).splitlines()[0]} Open the"
            " firewall between the nodes, and where they have several networks name one of ip -br addr:"
            " GLOO_SOCKET_IFNAME=<interface>.",
            everywhere=False,
        ) from error
    everyone = comm.from_all_ranks(world, own)
    leaders = [rank for rank, facts in enumerate(everyone) if facts is not None]
    nodes = _with_unique_names([facts for facts in everyone if facts is not None])
    node = name_of(nodes[bisect_right(leaders, world.rank) - 1])
    results: list[AllReduce] = []
    if world.size > 1:
        gpu = world.local_rank if all(map(_fits_nccl, nodes)) else None
        results = comm.from_all_ranks(world, measure_all_reduce(world, node, gpu))
    cluster = Cluster(tuple(nodes), tuple(results))
    code = comm.from_first_rank(world, _report(cluster, as_json) if world.is_first else ExitCode.DONE)
    if not any(result.error for result in results):  # else closing would wait for a rank that hangs
        comm.close_group()
    return code


def _with_unique_names(nodes: list[Facts]) -> list[Facts]:
    """Two nodes of one name (a test on one machine, containers) get numbers."""
    names = [name_of(node) for node in nodes]
    return [
        replace(node, system=replace(node.system, name=f"{name}#{place}"))
        if node.system and names.count(name) > 1
        else node
        for place, (node, name) in enumerate(zip(nodes, names, strict=True))
    ]


def _fits_nccl(node: Facts) -> bool:
    """Every rank of this node has a GPU of its own that works."""
    count = node.torch_cuda.count if node.torch_cuda else 0
    sound = not problems(gpu_findings(node))
    return node.settings.device in ("auto", "cuda") and sound and count >= node.ranks


def _report(facts: Facts | Cluster, as_json: bool) -> int:
    findings = examine_cluster(facts) if isinstance(facts, Cluster) else examine(facts)
    if as_json:
        print(json_of(facts, findings))
    elif isinstance(facts, Cluster):
        print_cluster(facts, findings)
        show(facts.nodes[0].settings.device, findings)
    else:
        print(header(facts))
        show(facts.settings.device, findings)
    return ExitCode.CRASH if problems(findings) else ExitCode.DONE
