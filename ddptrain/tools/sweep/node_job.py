"""Runs an attempt at a job: ``python -m ddptrain.tools.sweep.node_job <folder> <attempt> <words>``."""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from ddptrain.distributed.launcher.process import AGENT, end_with_agent, environment_of_no_rank
from ddptrain.errors import ExitCode
from ddptrain.tools.sweep.attempt_file import AttemptFile
from ddptrain.tools.sweep.machines import OUTPUT

_TICK_S = 0.2


def main(folder: Path, number: int, words: list[str]) -> int:
    """Returns the command's exit code. It is asked to save and stop by a scheduler's signal, or by the
    sweep."""
    end_with_agent()  # where a process of Ray's has started this one
    file = AttemptFile(folder, number)
    file.expect_request()
    with (folder / OUTPUT).open("ab") as output:
        facts = {"node": socket.gethostname(), "began": time.time(), "output_from": output.tell()}
        if not file.claim(facts):
            print("the sweep has given this attempt up", file=sys.stderr)
            return 0
        process = subprocess.Popen(
            words,
            env={**environment_of_no_rank(), AGENT: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a scheduler may signal this process's whole group
        )

    stopping = threading.Event()

    def stop(_: int = 0, __: FrameType | None = None) -> None:
        if not stopping.is_set():  # a second one would end it without saving
            stopping.set()
            process.send_signal(signal.SIGTERM)

    for one in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(one, stop)
    stopping_since = math.inf
    while (code := process.poll()) is None:
        if request := file.stop_request():
            if stopping_since == math.inf:
                stopping_since = time.monotonic()
                stop()
            if time.monotonic() - stopping_since > request["grace"]:
                _kill(process)
        time.sleep(_TICK_S)
    _kill(process)  # what it may have left in its group
    if stopping.is_set() and code in (-signal.SIGTERM, 128 + signal.SIGTERM):
        code = ExitCode.STOPPED  # it was asked before it had begun, and had nothing to save
    file.rewrite({**facts, "ended": time.time(), "code": code})
    return 128 - code if code < 0 else code


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
