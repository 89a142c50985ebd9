"""A real Ray cluster on this machine: a head and a second node, on loopback."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from debian import CannotRun


@contextlib.contextmanager
def loopback_ray() -> Iterator[dict[str, str]]:
    """Bring it up, two nodes with two CPUs each; inside, the variables by which it is found. Raises
    CannotRun."""
    ray = Path(sys.executable).with_name("ray")
    if not ray.exists():
        raise CannotRun("Ray is not installed: pip install -e '.[test,ray]'")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="ray-")  # short: it holds sockets
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    }
    address, here = f"127.0.0.1:{port}", "--node-ip-address=127.0.0.1"
    common = [here, "--num-cpus=2", "--num-gpus=0", "--block", "--object-store-memory=100000000"]
    head = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}"]
    look = f"import ray; ray.init('{address}'); print('alive:', sum(n['Alive'] for n in ray.nodes()))"
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        with (Path(folder) / "said.txt").open("wb") as said:
            for words in (head, [f"--address={address}"]):
                nodes.append(
                    subprocess.Popen(
                        [str(ray), "start", *words, *common],
                        env=variables, stdout=said, stderr=said, start_new_session=True,
                    )
                )  # fmt: skip
                time.sleep(8)
        deadline = time.monotonic() + 60
        told = ""
        while "alive: 2" not in told:
            assert time.monotonic() < deadline, told + (Path(folder) / "said.txt").read_text()
            told = subprocess.run(
                [sys.executable, "-c", look], env=variables, capture_output=True, text=True, timeout=60
            ).stdout
        yield {"RAY_ADDRESS": address}
    finally:
        for node in reversed(nodes):
            node.terminate()
        for node in nodes:
            node.wait(60)
        shutil.rmtree(folder, ignore_errors=True)
