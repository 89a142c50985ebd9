"""The controller by which a job asks its sweep whether to go on."""

import json
import math
import socket
from typing import final

from ddptrain.api.controller import Controller
from ddptrain.api.observer import Evaluated

_ANSWER_TIMEOUT_S = 60.0
"""For an answer: the sweep looks up ten times a second."""


@final
class Pruning(Controller):
    """Asks the sweep that started this job, at ``address``, whether it goes on after an evaluation. job: its
    number there.

    Raises RuntimeError where the sweep does not answer.
    """

    why = "pruned"

    def __init__(self, address: str, job: int) -> None:
        self._address = address
        self._job = job

    def goes_on(self, event: Evaluated) -> bool:
        question = {
            "job": self._job,
            "step": event.step,
            "steps": event.steps,
            "metric": event.metric,
            "value": event.value if math.isfinite(event.value) else None,  # JSON has no such numbers
            "higher_is_better": event.higher_is_better,
        }
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as call:
            call.settimeout(_ANSWER_TIMEOUT_S)
            try:
                call.connect(self._address)
                call.sendall(json.dumps(question).encode() + b"\n")
                with call.makefile("rb") as lines:
                    reply = lines.readline()
            except OSError as error:
                raise RuntimeError(f"the sweep that started this job does not answer ({error})") from error
        if not reply:
            raise RuntimeError("the sweep that started this job does not answer (it closed the line)")
        return bool(json.loads(reply)["goes_on"])
