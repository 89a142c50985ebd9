"""What loader processes can be given, and how."""

from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle
import torch

from ddptrain.errors import UserError

_MOST_SHARED = 128
"""Tensors that are shared with a process: for each a file descriptor is sent when it starts, 256 at most
(``multiprocessing.forkserver.MAXFDS_TO_SEND``)."""


def only_by_value(part: object) -> bool:
    """Whether loader processes can be given it only as a copy: with the code of its classes, which a script
    or a notebook defines, or with its tensors, which are too many to be shared. Raises UserError where they
    can't be given it at all."""
    shared: list[torch.UntypedStorage] = []

    def count(storage: torch.UntypedStorage) -> tuple[type[int], tuple[()]]:
        shared.append(storage)
        return int, ()  # in place of torch's own, which would move it into shared memory

    written = BytesIO()
    pickler: Any = ForkingPickler(written)
    pickler.dispatch_table = {**pickler.dispatch_table, torch.UntypedStorage: count}
    try:
        pickler.dump(part)
    except UserError:  # a part of it has asked the same
        raise
    except Exception:  # whatever a dataset's own __reduce__ or a C type raises
        try:
            cloudpickle.dumps(part)
        except Exception as error:
            raise UserError(
                f"data.workers: the data can't be sent to loader processes ({error}). Leave open files and"
                " locks out of the dataset, or set data.workers=0."
            ) from error
        return True
    return len(shared) > _MOST_SHARED or b"__main__" in written.getvalue()
