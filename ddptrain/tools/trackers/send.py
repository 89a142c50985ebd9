"""Sends a run's folder to a tracker: beside the training (``python -m ddptrain.tools.trackers.send <folder>
<tracker>``, until its stdin is closed), or once, afterwards. Imports no torch."""

import contextlib
import fcntl
import importlib
import io
import json
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import IO

from ddptrain.errors import UserError
from ddptrain.keys import did_you_mean, is_secret
from ddptrain.observe.lock import lock_file
from ddptrain.observe.metrics_file import read_lines
from ddptrain.tools.trackers.about import About, about, sent_so_far, write_sent
from ddptrain.tools.trackers.service import Service, is_installed

TRACKERS = {"mlflow": "ToMlflow", "wandb": "ToWandb", "trackio": "ToTrackio"}
_LOOKS_EVERY_S, _LONGEST_PAUSE_S = 2.0, 30.0
_NICE = 10
"""The training comes first; with 19 this would not start on a machine whose cores are all busy."""
_LAST_S = 40.0
"""How long it is tried again after the training's end."""


class Sender:
    """Sends what a tracker lacks, as often as it is asked to. After an error the next call begins where the
    tracker is."""

    def __init__(self, folder: Path, to: str, project: str | None = None) -> None:
        self.about: About = about(folder, to, project)
        self._to = to
        self._service: Service | None = None
        self._sent: dict[str, int] = {}
        self._files: dict[Path, tuple[int, int]] = {}
        """Time and size of what was sent."""

    def send(self, ended: bool) -> None:
        """Whatever is new. ended: and all that there is at the end. Raises what the tracker's library
        does."""
        try:
            self._send(ended)
        except BaseException:
            self._service = None
            raise

    def _send(self, ended: bool) -> None:
        if self._service is None:
            module = importlib.import_module(f"ddptrain.tools.trackers.to_{self._to}")
            service: Service = getattr(module, TRACKERS[self._to])(self.about)
            known = service.known
            self._sent = sent_so_far(self.about, self._to) if known is None else dict(known)
            self._service, self._files = service, {}
        service = self._service
        metrics = self.about.folder / "metrics.jsonl"
        if self._changed([metrics]):
            new = [line for line in read_lines(metrics) if line["step"] > self._sent.get(line["split"], -1)]
            service.log(new)
            self._sent |= {line["split"]: line["step"] for line in new}
            write_sent(self.about, self._to, self._sent)
        service.send_plots(self._changed(self.about.plots()))
        if ended:
            service.send_files(self.about.documents(), self.about.checkpoint())
            service.close(self.about.outcome)

    def _changed(self, paths: list[Path]) -> list[Path]:
        """Those that are not as they were sent; from now on they are."""
        states = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in paths if path.exists()}
        changed = [path for path, state in states.items() if self._files.get(path) != state]
        self._files |= states
        return changed


def locked(folder: Path, to: str, how: int) -> IO[str]:
    """A file, locked while it is open: one process sends a run to a tracker. Raises BlockingIOError."""
    file = (folder / "trackers" / f"{to}.lock").open("a")  # what a link leads to stays as it is
    lock_file(file, how)
    return file


def _is_still(folder: Path, to: str, lock: IO[str]) -> bool:
    """Whether the folder is that in which the lock was taken: it may have been deleted, or replaced."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), (folder / "trackers" / f"{to}.lock").stat())
    except OSError:
        return False


def send_once(folder: Path, to: str, project: str | None) -> str:
    """Send all that a tracker lacks of a run; returns where it is. Raises UserError that says what went
    wrong."""
    words = f"report run={folder} to={to}"
    if to not in TRACKERS:
        hint = did_you_mean(to, list(TRACKERS)) or f" There are {', '.join(TRACKERS)}."
        raise UserError(f"{words}: there is no such tracker.{hint}")
    if not is_installed(to):
        raise UserError(f"{words}: needs {to}: pip install 'ddptrain[{to}]'")
    if (folder / "trackers").is_symlink():
        raise UserError(f"{words}: {folder}/trackers is a link, which may lead anywhere. Remove it.")
    try:
        (folder / "trackers").mkdir(exist_ok=True)
        _lock = locked(folder, to, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{words}: the run's own process is sending it. Wait until the run ends.") from None
    except OSError as error:
        raise UserError(f"{words}: can't write into {folder}/trackers ({error.strerror}).") from error
    try:
        sender = Sender(folder, to, project)
        with contextlib.redirect_stdout(io.StringIO()):  # MLflow prints its address, with what is in it
            sender.send(ended=True)
    except Exception as error:  # of any kind: a tracker's library
        raise UserError(f"{words}: {in_words(error)}. Nothing is lost: start it again.") from None
    return f"{to}: project {sender.about.project}, run {sender.about.name}"


def in_words(error: BaseException) -> str:
    """An error in a line, without keys: neither those of the environment nor those within an address."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    for name, value in os.environ.items():
        if is_secret(name) and value:
            text = text.replace(value, "***")
    text = re.sub(r"//\S*@", "//***@", text)
    return text if len(text) < 300 else f"{text[:100]} ... {text[-200:]}"  # the cause stands last


def follow(folder: Path, to: str) -> str:
    """Send until stdin is closed, and then the rest. Returns what went wrong at last, or ''."""
    over = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        over.set()
        time.sleep(_LAST_S + 10)  # in a call that does not return
        os._exit(1)

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    pause, until, error, sender = _LOOKS_EVERY_S, None, "", None
    # of a run that was killed and started again at once, the earlier process may still be sending
    _lock = locked(folder, to, fcntl.LOCK_EX)
    while True:
        ended = over.wait(pause)
        if not _is_still(folder, to, _lock):
            os._exit(1)  # what is there now is not this run's
        if ended and until is None:
            until = time.monotonic() + _LAST_S
        began = time.monotonic()
        try:
            sender = sender or Sender(folder, to)
            sender.send(ended)
            # a long run's metrics.jsonl takes a while to read
            pause, error = max(_LOOKS_EVERY_S, 20 * (time.monotonic() - began)), ""
            if ended:
                return ""
        except Exception as problem:  # of any kind: a tracker's library
            pause, error = min(2 * pause, _LONGEST_PAUSE_S), in_words(problem)
            if until is not None:
                if time.monotonic() > until:
                    return error
                time.sleep(1)


def main(folder: Path, to: str) -> None:
    os.nice(_NICE)
    ours = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the libraries print
    error = follow(folder, to)
    run = about(folder, to)
    print(json.dumps({"error": error, "project": run.project, "run": run.name}), file=ours, flush=True)
    os._exit(0)  # the libraries' threads may hang on what was not sent


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
