"""The server in a sweep's process that its jobs ask, after each evaluation, whether to go on."""

import json
import select
import socket
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddptrain.text import parse_json

_QUESTION_TIMEOUT_S = 1.0
"""For a question to arrive, once a job has connected."""
_MOST_BYTES = 4096


class PruningServer:
    """A Unix socket. `ddptrain.sweep.pruning.Pruning` is the client."""

    def __init__(self) -> None:
        # not in the sweep's folder: a socket's path has at most 107 bytes
        self._folder = tempfile.TemporaryDirectory(prefix="ddptrain-")
        self._path = str(Path(self._folder.name) / "line")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self._path)
        self._socket.listen(128)

    def controller(self, number: int) -> str:
        """The override that makes the job of this number a client."""
        target = "_target_:ddptrain.sweep.pruning.Pruning"
        return f"+controllers.pruning={{{target},address:'{self._path}',job:{number}}}"

    def serve(self, seconds: float, answer: Callable[[Mapping[str, Any]], bool]) -> None:
        """Answer one question, if it comes within so many seconds."""
        ready, _, _ = select.select([self._socket], [], [], seconds)
        if not ready:
            return
        call, _ = self._socket.accept()
        with call:
            call.settimeout(_QUESTION_TIMEOUT_S)
            try:
                with call.makefile("rb") as lines:
                    question = parse_json(lines.readline(_MOST_BYTES))
                call.sendall(json.dumps({"goes_on": answer(question)}).encode() + b"\n")
            except (OSError, ValueError, KeyError, TypeError):  # its job was killed while it asked
                return

    def close(self) -> None:
        self._socket.close()
        self._folder.cleanup()
