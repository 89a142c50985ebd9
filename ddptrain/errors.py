"""What a run can end with: exit codes, and the errors that are the user's to fix."""

from collections.abc import Mapping
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

    ``everywhere`` says whether all ranks raise it together (a config error), so that rank 0 alone
    prints it, or this rank alone has met it (an unreadable image in its share).
    """

    def __init__(self, message: str, *, everywhere: bool = True) -> None:
        super().__init__(message)
        self.everywhere = everywhere

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (type(self), str(self), self.everywhere)


def _unpickled(kind: type[UserError], message: str, everywhere: bool) -> UserError:
    return kind(message, everywhere=everywhere)


class Diverged(ArithmeticError):
    """The loss or a gradient left the finite numbers; all ranks see it at the same step. Exit code 4.

    ``evidence``: plain values on where, for the run's folder.
    """

    def __init__(self, message: str, evidence: Mapping[str, object]) -> None:
        super().__init__(message)
        self.evidence = evidence


class Stopped(BaseException):
    """The run was asked to stop, and has saved its state; all ranks raise it at the same step. Exit code 75.

    No error, so that nothing that handles errors takes it for one: a sweep ends with it too.
    """


class RankLost(RuntimeError):
    """Another rank is gone or has failed. It has its own message; this one ends with its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class OutOfStep(RuntimeError):
    """The ranks do not do the same any more: one is at another step, or its weights differ. Exit code 1:
    started again, the run goes on from its last checkpoint."""


DOCTOR_HINT = "python -m ddptrain doctor says more"
"""For messages about devices."""
KNOWN_ENDS = (UserError, Diverged, Stopped, RankLost, OutOfStep)
"""What ends a run with a message of its own: everything else is a bug, and has a traceback."""
KnownEnd = UserError | Diverged | Stopped | RankLost | OutOfStep
