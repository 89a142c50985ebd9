"""A shell in a terminal of tmux: keys are typed, and what then stands on the screen is read."""

import contextlib
import shlex
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


class Terminal:
    def __init__(self, socket: str) -> None:
        self._socket = socket

    def type(self, text: str, *keys: str) -> None:
        """The text as it is, then keys by tmux's names: Tab, Enter, C-u."""
        self._tmux("send-keys", "-l", text)
        for key in keys:
            self._tmux("send-keys", key)

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """Until the text is on the screen; returns all of that, lines that were too long as one."""
        deadline = time.monotonic() + seconds
        while text not in (screen := self._tmux("capture-pane", "-p", "-J")):
            assert time.monotonic() < deadline, f"not within {seconds} s: {text!r}\n{screen}"
            time.sleep(0.05)
        return screen

    def clear(self) -> None:
        """Drop what has been typed, and empty the screen."""
        self._tmux("send-keys", "C-u", "C-l")

    def _tmux(self, *words: str) -> str:
        line = ["tmux", "-L", self._socket, *words]
        return subprocess.run(line, check=True, capture_output=True, text=True, timeout=60).stdout


@contextlib.contextmanager
def terminal(shell: Sequence[str], cwd: Path, variables: Mapping[str, str]) -> Iterator[Terminal]:
    """One with nothing in it but this shell."""
    socket = f"ddptrain-{uuid.uuid4().hex}"
    given = [f"{name}={value}" for name, value in variables.items()]
    start = ["tmux", "-L", socket, "-f", "/dev/null", "new-session", "-d", "-x", "180", "-y", "60"]
    subprocess.run([*start, "-c", str(cwd), shlex.join(["env", *given, *shell])], check=True, timeout=60)
    try:
        yield Terminal(socket)
    finally:
        subprocess.run(["tmux", "-L", socket, "kill-server"], check=True, timeout=60)
