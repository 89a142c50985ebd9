"""Whether torch has raised an error for lack of memory."""

import re

_SIGNS = re.compile(
    r"out of memory|DefaultCPUAllocator: can't allocate memory"
    # of libraries that take memory beside torch's: a workspace, or a handle in a context that is full
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED"
    r"|CUDNN_STATUS_\w*ALLOC\w*FAILED"
    # cuDNN's, where no algorithm's workspace fits
    r"|(?:FIND|GET) was unable to find an engine"
)


def in_one_line(error: BaseException) -> str:
    """How much was asked for and what there is, without what torch's own caches might do about it."""
    return str(error).partition("\n")[0].partition(" If reserved but")[0].rstrip(".")


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether torch has raised this error for lack of memory, of a GPU or of the host."""
    return isinstance(error, RuntimeError) and _SIGNS.search(str(error)) is not None
