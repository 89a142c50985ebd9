"""What a verb does on a rank, so that torchrun can tell of it."""

from collections.abc import Callable

from ddptrain.errors import KNOWN_ENDS, KnownEnd


def recorded(work: Callable[[], None]) -> None:
    """Let torchrun record a crash, so that it shows its traceback. What has a message of its own is none."""
    from torch.distributed.elastic.multiprocessing.errors import record

    expected: list[KnownEnd] = []

    def caught() -> None:
        try:
            work()
        except KNOWN_ENDS as error:
            expected.append(error)

    record(caught)()
    if expected:
        raise expected[0]
