"""Programs that doctor asks in separate processes: a driver that hangs, or a library that crashes, takes
the child along and not doctor."""

import base64
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from ddptrain.doctor.facts import ProbeFailure

_MARK = "ddptrain doctor: "  # Begins the lines that are for doctor; libraries may print what they like


def tell(section: str, value: Any) -> None:
    """In the child: a field of `Facts` and its value; the items of a tuple may come one by one."""
    print(f"{_MARK}{base64.b64encode(pickle.dumps((section, value))).decode()}", flush=True)


def begin(step: str) -> None:
    """In the child: what it turns to now, to be named if it hangs there."""
    tell("begin", step)


def ask(question: str, step: str, first_s: float, *words: str, then_s: float | None = None) -> dict[str, Any]:
    """Run a function of `ddptrain.doctor.questions` in a child, and gather the sections that it tells.

    step: the name of its first step, which may take ``first_s`` seconds, and each later one ``then_s``. A
    child that hangs is killed, and not waited for: one in a driver's call may never end. Whatever it has told
    by then counts.
    """
    find = f"import sys; sys.path[:] = {sys.path!r}"  # the same modules as this process
    start = f"{find}; from ddptrain.doctor import questions; questions.{question}(*sys.argv[1:])"
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-c", start, *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(child, lines), daemon=True).start()
        answers: dict[str, Any] = {}
        patience_s = first_s if then_s is None else then_s
        try:
            for section, value in _sections(lines, first_s, patience_s):
                if section == "begin":
                    step = value
                else:
                    earlier = answers.get(section, ())
                    answers[section] = (*earlier, *value) if isinstance(value, tuple) else value
            code = child.wait(patience_s)
        except (TimeoutError, subprocess.TimeoutExpired):
            child.kill()
            waited = patience_s if answers else first_s
            answers["failures"] = (ProbeFailure(step, f"{step}: no answer in {waited:g} s", hung=True),)
            return answers
        if code != 0:
            errors.seek(0)
            reason = _reason(code, errors.read().decode(errors="replace"))
            answers["failures"] = (ProbeFailure(step, f"{step}: {reason}"),)
        return answers


def _sections(
    lines: "queue.SimpleQueue[str | None]", wait_s: float, then_s: float
) -> Iterator[tuple[str, Any]]:
    """Raises TimeoutError where nothing comes for so long."""
    while True:
        try:
            line = lines.get(timeout=wait_s)
        except queue.Empty:
            raise TimeoutError from None
        if line is None:
            return
        if line.startswith(_MARK):
            wait_s = then_s
            yield pickle.loads(base64.b64decode(line.removeprefix(_MARK)))


def _read(child: "subprocess.Popen[str]", lines: "queue.SimpleQueue[str | None]") -> None:
    for line in child.stdout or ():
        lines.put(line)
    lines.put(None)


def _reason(code: int, errors: str) -> str:
    """How a child ended: its error's last line, or its signal."""
    if code < 0:
        return f"crashed by {signal.Signals(-code).name}"
    return errors.strip().splitlines()[-1].strip() if errors.strip() else f"ended with exit code {code}"
