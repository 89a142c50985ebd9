"""Garbage collection kept out of the imports: thousands of objects are made, and none of them is garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Inside nothing is collected, which makes importing torch a fifth faster; what is there at the end never
    is, so that later collections have less to look through. For imports alone."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
