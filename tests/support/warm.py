"""Command lines in forks of one process that has imported torch and more: seconds less for each."""

import atexit
import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

_SERVER = """
import atexit, gc, json, os, sys
import hydra, torch, torch.utils.tensorboard, torchvision
import ddptrain.config.compose, ddptrain.data.images.data, ddptrain.recipes.image
import ddptrain.run.train, ddptrain.verbs.saved_run
from ddptrain.distributed.launcher.process import end_with
from ddptrain.verbs.main import main
gc.freeze()
while line := sys.stdin.readline():
    asked = json.loads(line)
    child = os.fork()
    if not child:
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        for descriptor, file in enumerate([os.devnull, asked["out"], asked["err"]]):
            os.dup2(os.open(file, os.O_RDWR), descriptor)
        sys.argv = ["ddptrain", *asked["words"]]
        if threads := os.environ.get("OMP_NUM_THREADS"):  # which OpenMP reads when it is loaded
            torch.set_num_threads(int(threads))
        try:
            end_with(main, asked["words"])
        except SystemExit as end:  # what Python would do now takes a second in a fork
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.kill)
    return server


def run_warm(
    cwd: Path, words: Sequence[str], environment: Mapping[str, str], timeout: float
) -> tuple[int, str, str]:
    """The exit code of ``python -m ddptrain`` with these words, and what it has said on stdout and stderr."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        asked = {"cwd": str(cwd), "words": words, "environment": dict(environment)}
        server.stdin.write(json.dumps({**asked, "out": out.name, "err": err.name}) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], timeout)[0]:
            server.kill()
            _server.cache_clear()
            raise TimeoutError(f"{words}: has not ended after {timeout} seconds")
        code = int(server.stdout.readline())
        said = [Path(file.name).read_text(errors="replace") for file in (out, err)]
    return code, said[0], said[1]
