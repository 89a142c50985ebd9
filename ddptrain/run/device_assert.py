"""CUDA's device-side assert: a value that a kernel refuses, told when it is long past."""

_CUDAS = "device-side assert triggered"  # of cudaGetErrorString


def note_device_assert(error: BaseException) -> None:
    """Add what it most often means, and what names the line, if this error is one."""
    if _CUDAS in str(error):
        error.add_note(
            "(a kernel on the GPU has met a value that it refuses, most often an index that is out of range:"
            " a label against the model's classes, a token against its vocabulary. The line above may be a"
            " later one: debug.sync=true names the right one, and device=cpu the value, too)"
        )
