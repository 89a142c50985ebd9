"""Exit codes and the errors that end a run with a message."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of a rank; a scheduler can read them."""

    DONE = 0
    CRASH = 1
    USER_ERROR = 2
    DIVERGED = 4
    STOPPED = 75
    """Stopped on request, with a checkpoint written: start the same command again (EX_TEMPFAIL)."""
    HUNG = 76
    """A rank made no progress and was named."""
    INTERRUPTED = 130
    """Ctrl-C, as shells count it: 128 + SIGINT."""


class UserError(ValueError):
    """The user's input is wrong: config, data, checkpoint or device.

    The message names the key or file, the value, the rule and the fix. It is printed once, without
    a traceback, and the process exits with 2.

    ``everywhere``: all ranks raise it together (a config error), so that only rank 0 prints it; False: this
    rank alone has found it (an unreadable image in its share). ``agreed``: a collective has told all ranks.
    """

    def __init__(self, message: str, *, everywhere: bool = True) -> None:
        super().__init__(message)
        self.everywhere = everywhere
        self.agreed = False

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (type(self), str(self), self.everywhere)


@contextmanager
def of_this_rank() -> Iterator[None]:
    """UserErrors inside are this rank's alone, unless a collective has told all."""
    try:
        yield
    except UserError as error:
        error.everywhere = error.agreed
        raise


def _unpickled(kind: type[UserError], message: str, everywhere: bool) -> UserError:
    return kind(message, everywhere=everywhere)


def reason(error: BaseException) -> str:
    """What an error of a library says, in a line of a message: the system's own words, or the error's; after
    its kind where those are none or one (``KeyError: 'format'``), and without their middle where they are
    many."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    words = str(error).split()
    text = " ".join(words if len(words) > 1 else [f"{type(error).__name__}:", *words]).rstrip(".:")
    return text if len(text) <= 220 else f"{text[:100]} ... {text[-100:]}"


def check_least(key: str, least: int, **values: int) -> None:
    """Raises UserError where one of the values, of the keys ``<key>.<name>``, is less than ``least``."""
    for name, value in values.items():
        if value < least:
            raise UserError(f"{key}.{name}={value}: must be {least} or more.")


class Diverged(ArithmeticError):
    """The loss or a gradient is not finite; all ranks raise it at the same step. Exit code 4.

    ``evidence``: details as plain values, for the run's folder.
    """

    def __init__(self, message: str, evidence: Mapping[str, object]) -> None:
        super().__init__(message)
        self.evidence = evidence


class Stopped(BaseException):
    """The run was asked to stop, and has saved its state; all ranks raise it at the same step. Exit code 75.

    A BaseException, so that no error handler catches it: a sweep ends with it too.
    """


class RankLost(RuntimeError):
    """Another rank is gone or has failed. This one ends with its exit code.

    shown: whether the message is to be printed, or that rank has done so.
    """

    def __init__(self, message: str, code: int, shown: bool = True) -> None:
        super().__init__(message)
        self.code = code
        self.shown = shown


class OutOfStep(RuntimeError):
    """The ranks have diverged from each other: one is at another step, or its weights differ. Exit code 1;
    started again, the run continues from its last checkpoint."""


DOCTOR_HINT = "python -m ddptrain doctor says more"
"""For messages about devices."""
KNOWN_ENDS = (UserError, Diverged, Stopped, RankLost, OutOfStep)
"""Exceptions that end a run with a message; all others are bugs, and have a traceback."""


def what_ended(error: BaseException | None) -> str:
    """An error in words: its message, after its kind where that is a bug's; '' for None."""
    if error is None:
        return ""
    return str(error) if isinstance(error, KNOWN_ENDS) else f"{type(error).__name__}: {error}"
