"""Nodes against each other."""

import dataclasses
from collections.abc import Iterator

from ddptrain.doctor.examine import examine
from ddptrain.doctor.facts import Cluster, Facts, System, Torch
from ddptrain.doctor.findings import LEVELS, Finding, comma_list, ok, problem, warning
from ddptrain.doctor.rules_gpu import links

_SKEW_S = 1.0


def examine_cluster(cluster: Cluster) -> list[Finding]:
    """Each node's findings with its name, and what differs between them."""
    count = len(cluster.nodes)
    backend = cluster.links[0].backend if cluster.links else ""
    found = [*versions(cluster), *clocks(cluster), *links(cluster.links, backend)]
    whose: dict[Finding, list[str]] = {}
    for node in cluster.nodes:
        for finding in examine(node):
            whose.setdefault(finding, []).append(name_of(node))
    for finding, names in whose.items():
        node_names = f"all {count} nodes" if len(names) == count > 1 else ", ".join(names)
        found.append(dataclasses.replace(finding, node=node_names))
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


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
    for part, found in by_part.items():
        comes_with_torch = part in ("CUDA", "NCCL") and len(set(by_part["torch"])) > 1
        if len(set(found)) > 1 and not comes_with_torch:
            pairs = zip(cluster.nodes, found, strict=True)
            level = warning if part in ("python", "driver") else problem
            yield level(
                f"differs-{part.lower()}",
                comma_list([f"{name_of(node)} {version or 'none'}" for node, version in pairs]),
                f"the nodes have different versions of {part}: they may disagree on what they send or"
                " compute.",
                "set all nodes up from one image, or one shared virtual environment.",
            )


def clocks(cluster: Cluster) -> Iterator[Finding]:
    pairs = list(zip(cluster.nodes, cluster.skews, strict=True))
    skews = comma_list([f"{name_of(node)} {skew:+.3f} s" for node, skew in pairs[1:]])
    if any(abs(skew) > _SKEW_S for _, skew in pairs):
        yield warning(
            "clock-skew", skews,
            "the clocks of the nodes differ, so their logs and files can't be put in order.",
            "timedatectl set-ntp true on each node (or start chronyd).",
        )  # fmt: skip
    elif len(pairs) > 1:
        yield ok("clock-skew", skews)


def name_of(node: Facts) -> str:
    return node.system.name if node.system else "?"
