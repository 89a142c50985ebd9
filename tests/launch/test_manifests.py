"""launch/kubernetes: every key is one of Kubernetes' or Kubeflow Trainer's, and the nodes it describes meet.

`sh setup.sh check` brings what this needs; the tests alone do not.
"""

import copy
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from shell import RANK_VARIABLES

from ddptrain.config.schema import Config

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="of the extra dev: sh setup.sh check")
jsonschema = pytest.importorskip("jsonschema", reason="comes with kubernetes-validate")

FOLDER = Path(__file__).parents[2] / "launch/kubernetes"
TRAINER = json.loads((Path(__file__).parent / "trainer.schema.json").read_text())
NAMES_OF_ONES_OWN = ("labels", "selector", "limits", "requests")
DOCUMENTS = {
    f"{path.stem} {document['kind']}": document
    for path in sorted(FOLDER.glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
}


def refused(document: dict[str, Any]) -> str:
    """Why a cluster would not take it, or would silently drop a part of it; empty where it would."""
    try:
        if not document["apiVersion"].startswith("trainer.kubeflow.org/"):
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
            return ""
        jsonschema.validate(document, TRAINER, jsonschema.Draft202012Validator)
        for job in jobs(document):
            kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
    except (kubernetes_validate.ValidationError, jsonschema.ValidationError) as error:
        return str(error.message)
    except (KeyError, kubernetes_validate.SchemaNotFoundError) as error:
        return str(error) or "no such kind"
    return ""


def jobs(document: dict[str, Any]) -> list[dict[str, Any]]:
    """A Job, or those that a runtime makes of its templates."""
    if document["kind"] == "Job":
        return [document]
    if document["kind"] != "TrainingRuntime":
        return []
    templates = [one["template"] for one in document["spec"]["template"]["spec"]["replicatedJobs"]]
    return [{"apiVersion": "batch/v1", "kind": "Job", **template} for template in templates]


def places(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths to all keys that Kubernetes names."""
    if isinstance(node, list):
        for i, item in enumerate(node):
            yield from places(item, (*path, i))
    elif isinstance(node, dict) and path[-1:] != () and path[-1] in NAMES_OF_ONES_OWN:
        return
    elif isinstance(node, dict):
        for key, value in node.items():
            yield (*path, key)
            yield from places(value, (*path, key))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_key_and_value_is_one_that_a_cluster_takes(name: str) -> None:
    assert refused(DOCUMENTS[name]) == ""


@pytest.mark.parametrize("name", DOCUMENTS)
def test_each_key_is_refused_when_it_is_misspelt(name: str) -> None:
    """Or the check would check nothing."""
    tried = 0
    for path in places(DOCUMENTS[name]):
        document = copy.deepcopy(DOCUMENTS[name])
        node: Any = document
        for step in path[:-1]:
            node = node[step]
        node[f"{path[-1]}x"] = node.pop(path[-1])
        assert refused(document), path
        tried += 1
    assert tried >= 6


def test_a_wrong_value_is_refused() -> None:
    job, train_job = copy.deepcopy(DOCUMENTS["job Job"]), copy.deepcopy(DOCUMENTS["trainjob TrainJob"])
    job["spec"]["completions"] = "two"
    train_job["spec"]["trainer"]["numProcPerNode"] = "gpu"
    assert refused(job)
    assert "numProcPerNode" in refused(train_job)


@pytest.mark.parametrize("name", ["job Job", "trainjob TrainingRuntime"])
def test_pods_have_time_to_save_and_their_exit_codes_are_heeded(name: str) -> None:
    [job] = jobs(DOCUMENTS[name])
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["restartPolicy"] == "Never", "what a podFailurePolicy needs"
    assert pod["terminationGracePeriodSeconds"] > Config().checkpoint.grace
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    [shm] = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"
    actions = {
        code: rule["action"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        if rule.get("onExitCodes", {}).get("containerName") == container["name"]
        for code in rule["onExitCodes"]["values"]
    }
    assert actions == {2: "FailJob", 4: "FailJob", 75: "Ignore"}


def variables(name: str, index: int, port: int) -> dict[str, str]:
    """What a pod finds in its environment, with all pods on this machine."""
    [job] = jobs(DOCUMENTS[name])
    fields = {
        "metadata.labels['batch.kubernetes.io/job-name']": "ddptrain",
        "metadata.labels['jobset.sigs.k8s.io/jobset-name']": "ddptrain",
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
        "status.podIP": "127.0.0.1",
    }
    found: dict[str, str] = {}
    for entry in job["spec"]["template"]["spec"]["containers"][0]["env"]:
        value = entry["value"] if "value" in entry else fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for earlier in found:  # a kubelet knows what stands above only
            value = value.replace(f"$({earlier})", found[earlier])
        found[entry["name"]] = value
    if name == "trainjob TrainingRuntime":  # as Trainer adds them
        found |= {"PET_NNODES": "2", "PET_NODE_RANK": str(index), "PET_MASTER_PORT": "29500"}
        found["PET_MASTER_ADDR"] = "ddptrain-node-0-0.ddptrain"
        assert found["PET_RDZV_ENDPOINT"] == f"{found['PET_MASTER_ADDR']}:{found['PET_MASTER_PORT']}"
    else:
        assert found["PET_RDZV_ENDPOINT"] == "ddptrain-0.ddptrain:29400"
    return {**found, "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}", "PET_NPROC_PER_NODE": "1"}


@pytest.mark.long
@pytest.mark.parametrize("name", ["job Job", "trainjob TrainingRuntime"])
def test_nodes_with_these_variables_train_one_run(tmp_path: Path, name: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    inherited = {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES}
    words = ["recipe=cnn_cifar10", "data=shapes", "data.source.train=64", "data.source.valid=32"]
    words += ["device=cpu", "train.batch_size=32", "train.epochs=1", "observers=[console,jsonl,plots]"]
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "ddptrain", "launch", *words],
            cwd=tmp_path, env={**inherited, **variables(name, index, port), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    said = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    [run] = tmp_path.glob("runs/cnn_cifar10/*")
    assert json.loads((run / "environment.json").read_text())["world_size"] == 2
