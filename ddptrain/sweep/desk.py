"""The sweep's end of a line to its jobs: a job says how it does, and hears whether to go on."""

import json
import select
import socket
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_SAY_S = 1.0
"""For a question, once a job has called."""
_MOST_BYTES = 4096


class Desk:
    """The sweep's end: a socket that jobs call at after each evaluation."""

    def __init__(self) -> None:
        # not in the sweep's folder: a socket's path has at most 107 bytes
        self._folder = tempfile.TemporaryDirectory(prefix="ddptrain-")
        self._path = str(Path(self._folder.name) / "line")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self._path)
        self._socket.listen(128)

    def controller(self, number: int) -> str:
        """The override by which the job of this number finds it."""
        target = "_target_:ddptrain.sweep.pruning.Pruning"
        return f"+controllers.pruning={{{target},address:'{self._path}',job:{number}}}"

    def wait(self, seconds: float, answer: Callable[[Mapping[str, Any]], bool]) -> None:
        """Answer who calls within so many seconds; returns after the first, or when the time is over."""
        ready, _, _ = select.select([self._socket], [], [], seconds)
        if not ready:
            return
        call, _ = self._socket.accept()
        with call:
            call.settimeout(_SAY_S)
            try:
                with call.makefile("rb") as lines:
                    question = json.loads(lines.readline(_MOST_BYTES))
                call.sendall(json.dumps({"goes_on": answer(question)}).encode() + b"\n")
            except (OSError, ValueError):  # its job was killed while it asked
                return

    def close(self) -> None:
        self._socket.close()
        self._folder.cleanup()
