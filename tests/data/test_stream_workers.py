"""What loader processes are sent of a streamed set."""

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch

from ddptrain.data.stream.opened import Column


def test_a_column_can_be_sent_to_workers_again_and_again(tmp_path: Path) -> None:
    """As the labels of pictures that are mixed, and the sizes of those with boxes."""
    values = torch.arange(12, dtype=torch.int64)
    (tmp_path / "labels").write_bytes(values.numpy().tobytes())
    column = Column(tmp_path / "labels", "int64", (6, 2)).read()
    for _ in range(2):
        sent = io.BytesIO()
        ForkingPickler(sent).dump(column)
        assert torch.equal(pickle.loads(sent.getvalue()), values.view(6, 2))
