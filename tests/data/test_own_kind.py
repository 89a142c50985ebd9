"""A kind of data of one's own, as docs/recipes.md shows it, on the pipeline of the others."""

import json
from pathlib import Path

import numpy as np
import pytest
from shell import ddptrain

MINE = Path(__file__).parents[1] / "packaging/my_data"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of sines of other pitches, of 300 samples and more."""
    folder, generator = tmp_path_factory.mktemp("recordings"), np.random.default_rng(0)
    for part, count in (("train", 20), ("valid", 6)):
        for label, pitch in (("high", 1.3), ("low", 0.4)):
            (folder / part / label).mkdir(parents=True)
            for i in range(count):
                time = np.arange(300 + i) + generator.uniform(0, 9)
                np.save(folder / part / label / f"{i}.npy", np.sin(pitch * time))
    return folder


@pytest.mark.long
def test_it_trains_with_the_same_losses_on_any_ranks_and_workers(root: Path, tmp_path: Path) -> None:
    words = (
        f"--config-dir {MINE} recipe=cnn_digits data=recordings data.root={root} device=cpu precision=fp32"
        " strategy=strict train.batch_size=8 train.steps=15 log.every=1 observers=[jsonl]"
    )
    losses = []
    for ranks, workers in ((1, 0), (1, 2), (2, 0)):
        verb = f"launch --nproc-per-node={ranks} " if ranks > 1 else ""
        run = tmp_path / f"{ranks}-{workers}"
        ended = ddptrain(tmp_path, f"{verb}{words} data.workers={workers} run.dir={run}", OMP_NUM_THREADS="1")
        assert ended.code == 0, ended.err
        rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        losses.append([row["loss"] for row in rows if row.get("split") == "train"])
    assert losses[0] == losses[1] == losses[2]
    assert len(losses[0]) == 15
    assert losses[0][-1] < losses[0][0] / 2
