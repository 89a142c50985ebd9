"""Both ends of a line between a sweep and its jobs: a job tells how it does, and hears whether to go on."""

import json
import math
import os
import select
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddptrain.engine.stop_rule import Standing

_LINE = "DDPTRAIN_SWEEP"
_JOB = "DDPTRAIN_JOB"
_PATIENCE_S = 60.0
"""For an answer: the sweep looks up ten times a second."""
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

    def environment(self, number: int) -> dict[str, str]:
        """What the job of this number is started with."""
        return {_LINE: self._path, _JOB: str(number)}

    def wait(self, seconds: float, answer: Callable[[Mapping[str, Any]], bool]) -> None:
        """Answer who calls within so many seconds; returns after the first, or when the time is over."""
        ready, _, _ = select.select([self._socket], [], [], seconds)
        if not ready:
            return
        call, _ = self._socket.accept()
        with call:
            call.settimeout(_SAY_S)
            try:
                question = json.loads(_line(call))
                call.sendall(json.dumps({"goes_on": answer(question)}).encode() + b"\n")
            except (OSError, ValueError):  # its job was killed while it asked
                return

    def close(self) -> None:
        self._socket.close()
        self._folder.cleanup()


def asks() -> bool:
    """Whether this process is a job of a sweep."""
    return _LINE in os.environ


def goes_on(standing: Standing) -> bool:
    """Ask the sweep that started this job whether it is to go on after an evaluation; by rank 0 only.

    Raises RuntimeError where the sweep does not answer.
    """
    question = {**asdict(standing), "job": int(os.environ[_JOB])}
    if not math.isfinite(standing.value):  # JSON has no such numbers
        question["value"] = None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as call:
        call.settimeout(_PATIENCE_S)
        try:
            call.connect(os.environ[_LINE])
            call.sendall(json.dumps(question).encode() + b"\n")
            reply = _line(call)
        except OSError as error:
            raise RuntimeError(f"the sweep that started this job does not answer ({error})") from error
    if not reply:
        raise RuntimeError("the sweep that started this job does not answer (it closed the line)")
    return bool(json.loads(reply)["goes_on"])


def _line(call: socket.socket) -> bytes:
    """Up to the end of the line, or of the connection."""
    read = b""
    while not read.endswith(b"\n") and len(read) < _MOST_BYTES:
        part = call.recv(_MOST_BYTES)
        if not part:
            break
        read += part
    return read
