"""What a run can end with: exit codes, and the errors that are the user's to fix."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of a rank; a scheduler can read them."""

    DONE = 0
    CRASH = 1
    USER_ERROR = 2
    DIVERGED = 4
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
    """The loss left the finite numbers; all ranks see it at the same step. Exit code 4."""
