"""``ddptrain.train``: a training in processes of its own. Imports no torch."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import dropwhile
from pathlib import Path
from typing import Any, Self

from ddptrain.config.arguments import OURS
from ddptrain.distributed.launcher.process import AGENT, environment_of_no_rank
from ddptrain.errors import ExitCode, UserError
from ddptrain.python.run import Run
from ddptrain.verbs.argv import parse

_FIRST_LINE = re.compile(r"ddptrain \S+  recipe .+?  run (.+)")
"""Of the log. It names the folder."""
_RANK = r"(\[rank\d+\]: )?"
"""Before a line of a traceback, where there are several."""
_LINES_KEPT = 1000
_LINES_SHOWN = 30


def train(*words: str, ranks: int = 1) -> Run:
    """Train as ``python -m ddptrain <words>`` does, and wait for the end: ``train("recipe=cnn_digits")``.

    The training has processes of its own, one for each rank: this one gets no CUDA context and keeps its
    memory. They end with this process, however it ends. The log is printed; in a notebook the line of the
    last step stays in one place.

    Ctrl-C, or a notebook's interrupt, stops it: it saves, and the run is returned with the outcome
    ``stopped``. ``train(..., f"run.dir={run.folder}")`` goes on. A second one ends it at once, without saving
    (KeyboardInterrupt), and so does one before the run has begun. SIGTERM, SIGUSR1 and a closed terminal
    (SIGHUP) end this program, too, once the training has saved: with exit code 75 (SystemExit).

    words: overrides, ``--config-dir``, ``--env``, ``--trust`` and ``--script``, as on the command line.
    ranks: processes, usually one per GPU. Raises UserError, a ValueError, with the message for what the
    user can mend; RuntimeError with the end of the log where the training has failed.
    """
    check_options(words, "train takes overrides, --config-dir and --env; --script and --trust, too")
    return Run(train_in_processes(words, ranks, {}))


def check_options(words: Sequence[str], rule: str) -> None:
    """Raises UserError, which says the rule, for an option that trains nothing, or more than one run."""
    for option in parse(["train", *words]).options:
        if option.partition("=")[0] not in OURS:
            raise UserError(f"{option}: {rule}. For all others use the command line.")


def train_in_processes(words: Sequence[str], ranks: int, environment: Mapping[str, str]) -> Path:
    """As `train`; returns the run's folder. environment: further variables of the processes."""
    if not isinstance(ranks, int) or ranks < 1:
        raise UserError(f"ranks={ranks!r}: must be 1 or more, a whole number.")
    verb = ["train"] if ranks == 1 else ["launch", f"--nproc-per-node={ranks}"]
    command = [sys.executable, "-u", "-m", "ddptrain", *verb, *words]
    show, said, folder = _shower(), deque[str](maxlen=_LINES_KEPT), None
    message: list[str] = []
    inherited = environment_of_no_rank()  # the training is on this node alone
    with _Signals() as signals:
        process = subprocess.Popen(
            command,
            env={**inherited, **environment, AGENT: str(os.getpid()), "PYTHONIOENCODING": "utf-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",  # whatever the streams of this process can: the folder is read from the log
            errors="replace",
            start_new_session=True,  # a Ctrl-C at the terminal reaches it through this process alone
        )
        signals.pass_on_to(process)
        with process:
            assert process.stdout is not None
            try:
                for line in map(str.rstrip, process.stdout):
                    said.append(line)
                    if folder is None and (first := _FIRST_LINE.fullmatch(line)):
                        folder = first[1]
                    if message or line.startswith("ddptrain: "):
                        message.append(line)  # held back: it may be raised
                    else:
                        show(line)
                code = process.wait()
            finally:
                process.kill()  # nothing where it has ended; its ranks end with it
    if code != ExitCode.USER_ERROR:
        for line in message:
            show(line)
    if ends := [number for number in signals.heard if number != signal.SIGINT]:
        saved = code in (ExitCode.DONE, ExitCode.STOPPED)
        raise SystemExit(int(ExitCode.STOPPED) if saved else 128 + ends[0])
    if folder is not None and code in (ExitCode.DONE, ExitCode.STOPPED):
        return Path(folder)
    if signals.heard:
        raise KeyboardInterrupt("the training has ended before it could save")
    if code == ExitCode.USER_ERROR:
        raise UserError(re.split(r"^ddptrain: ", "\n".join(said), flags=re.MULTILINE)[-1].strip())
    raise RuntimeError(f"the training has failed, with exit code {code}:\n{_end_of(said)}")


def _end_of(log: Iterable[str]) -> str:
    """Its last lines; of a traceback, which was shown, the error alone."""
    lines = list(log)[-_LINES_SHOWN:]
    frames = [number for number, line in enumerate(lines) if re.match(rf'{_RANK}  File "', line)]
    error = dropwhile(re.compile(f"{_RANK} ").match, lines[frames[-1] :]) if frames else ()
    return "\n".join(list(error) or lines)


class _Signals:
    """Inside, what asks this program to stop asks the training to save and stop; a second Ctrl-C kills it.
    Signals that the program handles itself stay its own, but for Ctrl-C. They are the main thread's alone: in
    another this does nothing."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self._before: dict[int, Any] = {}
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
                if number == signal.SIGINT or signal.getsignal(number) is signal.SIG_DFL:
                    self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pass_on_to(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        for number in self.heard:  # it came while the process was being made
            process.send_signal(number)

    def _hear(self, number: int, _: object) -> None:
        self.heard.append(number)
        if self._process is not None:
            kills = number == signal.SIGINT and self.heard.count(number) > 1
            self._process.send_signal(signal.SIGKILL if kills else number)


def _print(line: str) -> None:
    """As stderr does: a name may hold what the stream lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with suppress(OSError):  # the terminal is closed, and the training saves
        print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _shower() -> Callable[[str], None]:
    """What shows a line of the log: in a notebook the last step's in one place, else by ``print``."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or "IPKernelApp" not in shell.config:
        return _print
    from IPython.display import display

    place = display({"text/plain": ""}, raw=True, display_id=True)

    def show(line: str) -> None:
        if line.startswith("step "):
            place.update({"text/plain": line}, raw=True)
        else:
            print(line)

    return show
