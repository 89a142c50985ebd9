"""Nodes against each other."""

import dataclasses
from collections.abc import Iterator

from ddptrain.doctor.examine import examine
from ddptrain.doctor.facts import Cluster, Facts, System, Torch
from ddptrain.doctor.findings import LEVELS, Finding, comma_list, ok, problem, warning


def examine_cluster(cluster: Cluster) -> list[Finding]:
    """Each node's findings with its name, and what differs between them."""
    findings = [*versions(cluster), *all_reduce(cluster)]
    whose: dict[Finding, list[str]] = {}
    for node in cluster.nodes:
        for finding in examine(node):
            whose.setdefault(finding, []).append(name_of(node))
    for finding, names in whose.items():
        findings.append(dataclasses.replace(finding, node=_node_names(cluster, names)))
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def versions(cluster: Cluster) -> Iterator[Finding]:
    """Training refuses some of these differences itself; all should be the same."""
    systems = [node.system or System() for node in cluster.nodes]
    torches = [node.torch or Torch("") for node in cluster.nodes]
    by_part = {
        "ddptrain": [system.ddptrain for system in systems],
        "torch": [torch.version for torch in torches],
        "CUDA": [str(torch.cuda) for torch in torches],
        "NCCL": [torch.nccl for torch in torches],
        "python": [system.python for system in systems],
        "driver": [node.driver_version for node in cluster.nodes],
    }
    for part, by_node in by_part.items():
        comes_with_torch = part in ("CUDA", "NCCL") and len(set(by_part["torch"])) > 1
        if len(set(by_node)) > 1 and not comes_with_torch:
            pairs = zip(cluster.nodes, by_node, strict=True)
            level = warning if part in ("python", "driver") else problem
            yield level(
                f"differs-{part.lower()}",
                comma_list([f"{name_of(node)} {version or 'none'}" for node, version in pairs]),
                f"the nodes have different versions of {part}: they may disagree on what they send or"
                " compute.",
                "set all nodes up from one image, or one shared virtual environment.",
            )


def all_reduce(cluster: Cluster) -> Iterator[Finding]:
    """The one among all ranks."""
    failed = [result for result in cluster.all_reduces if result.error]
    causes = [result for result in failed if not result.hung] or failed
    if causes:
        first = causes[0]
        fails = problem(
            "all-reduce-fails", f"{first.backend}, rank {first.rank} on {first.node}: {first.error}",
            f"the all-reduce among all {len(cluster.all_reduces)} ranks failed, so gradients can't be added"
            " up.",
            "NCCL_DEBUG=INFO before the same command shows where it stops; with several networks name one:"
            " NCCL_SOCKET_IFNAME=<interface of ip -br addr> (gloo: GLOO_SOCKET_IFNAME).",
        )  # fmt: skip
        names = list(dict.fromkeys(result.node for result in causes))
        yield dataclasses.replace(fails, node=_node_names(cluster, names))
    elif cluster.all_reduces:
        slowest = min(cluster.all_reduces, key=lambda result: result.gb_per_s)
        size = f"{slowest.megabytes:.0f} MB among {len(cluster.all_reduces)} ranks"
        yield ok("all-reduce", f"{slowest.backend}, {size}: {slowest.gb_per_s:.2f} GB/s")


def name_of(node: Facts) -> str:
    return node.system.name if node.system else "?"


def _node_names(cluster: Cluster, names: list[str]) -> str:
    count = len(cluster.nodes)
    return f"all {count} nodes" if len(names) == count > 1 else ", ".join(names)
