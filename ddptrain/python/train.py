"""``ddptrain.train``: a training in processes of its own. Imports no torch."""

import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence

from ddptrain.cli.argv import CONFIG_DIR, parse
from ddptrain.errors import ExitCode, UserError
from ddptrain.launcher.process import AGENT
from ddptrain.python.run import Run

_FIRST_LINE = re.compile(r"ddptrain \S+  recipe .+?  run (.+)")
"""Of the log. It names the folder."""
_LINES_KEPT = 1000
_LINES_SHOWN = 30


def train(*words: str, ranks: int = 1) -> Run:
    """Train as ``python -m ddptrain <words>`` does, and wait for the end: ``train("recipe=cnn_digits")``.

    The training has processes of its own, one for each rank: this one gets no CUDA context and keeps its
    memory. They end with this process, however it ends. The log is printed; in a notebook the line of the
    last step stays in one place.

    Ctrl-C, or a notebook's interrupt, stops it: it saves, and the run is returned with the outcome
    ``stopped``. ``train(..., f"run.dir={run.folder}")`` goes on. A second one ends it at once, without saving
    (KeyboardInterrupt), and so does one before the run has begun.

    words: overrides and ``--config-dir=<folder>``, as on the command line. ranks: processes, usually one per
    GPU. Raises UserError, a ValueError, with the message for what the user can mend; RuntimeError with the
    end of the log where the training has failed.
    """
    if ranks < 1:
        raise UserError(f"ranks={ranks}: must be 1 or more.")
    for option in parse(["train", *words]).options:
        if option.partition("=")[0] not in CONFIG_DIR:
            raise UserError(f"{option}: train takes overrides and --config-dir only; use the command line.")
    verb = ["train"] if ranks == 1 else ["launch", f"--nproc-per-node={ranks}"]
    return _run([sys.executable, "-u", "-m", "ddptrain", *verb, *words])


def _run(command: Sequence[str]) -> Run:
    show, said, folder, interrupted = _shower(), deque[str](maxlen=_LINES_KEPT), None, False
    # without what a scheduler says to torchrun: the training is on this node alone
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    with subprocess.Popen(
        command,
        env={**inherited, AGENT: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a Ctrl-C at the terminal reaches it through this process alone
    ) as process:
        assert process.stdout is not None
        try:
            while process.poll() is None:
                try:
                    for line in map(str.rstrip, process.stdout):
                        said.append(line)
                        if folder is None and (first := _FIRST_LINE.fullmatch(line)):
                            folder = first[1]
                        show(line)
                    process.wait()
                except KeyboardInterrupt:
                    if interrupted:
                        raise
                    interrupted = True
                    process.send_signal(signal.SIGINT)
        finally:
            process.kill()  # nothing where it has ended; its ranks end with it
    if folder is not None and process.returncode in (ExitCode.DONE, ExitCode.STOPPED):
        return Run(folder)
    if interrupted:
        raise KeyboardInterrupt("the training has ended before it could save")
    if process.returncode == ExitCode.USER_ERROR:
        raise UserError(re.split(r"^ddptrain: ", "\n".join(said), flags=re.MULTILINE)[-1].strip())
    end = "\n".join(list(said)[-_LINES_SHOWN:])
    raise RuntimeError(f"the training has failed, with exit code {process.returncode}:\n{end}")


def _shower() -> Callable[[str], None]:
    """What shows a line of the log: in a notebook the last step's in one place, else by ``print``."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or "IPKernelApp" not in shell.config:
        return print
    from IPython.display import display

    place = display({"text/plain": ""}, raw=True, display_id=True)

    def show(line: str) -> None:
        if line.startswith("step "):
            place.update({"text/plain": line}, raw=True)
        else:
            print(line)

    return show
