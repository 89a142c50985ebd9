"""In a child: the PyTorch that is installed, what it makes of the GPUs, and the proofs on the device."""

import dataclasses

from ddptrain.doctor import proof
from ddptrain.doctor.children import begin, tell
from ddptrain.doctor.torch_facts import as_built, ask_gpus


def main(asked: str) -> None:
    """asked: auto, cpu, cuda, cuda:<index>."""
    tell("torch", dataclasses.asdict(as_built()))
    count = 0
    if asked != "cpu":
        begin("cuda")
        found = ask_gpus()
        tell("torch_cuda", dataclasses.asdict(found))
        count = found.count
    begin("proof")
    for device in proof.devices(asked, count):
        for proved in proof.on(device):
            tell("proofs", [dataclasses.asdict(proved)])
    begin("all-reduce")
    if asked in ("auto", "cuda") and count > 1:
        for link in proof.between_gpus(count):
            tell("links", [dataclasses.asdict(link)])
    begin("end")
