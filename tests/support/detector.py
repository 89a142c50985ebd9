"""A small detector, trained by a command line in seconds."""

import shutil
from pathlib import Path

from shell import Ended, ddptrain

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SET = "data.source.train=32 data.source.valid=8 data.source.size=64"
LEARNS = (
    "device=cpu train.batch_size=8 train.steps=40 train.eval_every=20 train.eval_batch_size=3 log.every=10"
    " checkpoint.every=10 ema.decay=0.9 optim.lr=0.02 data.augment.mosaic=0.2 data.augment.zoom=0.2"
)
SHAPES = f"recipe=yolo_shapes {SET} {LEARNS}"
LAST = "checkpoints/step-40"
LONGER = 120
"""Steps after which it finds something on every machine; after 40 its scores may still be zero."""


def custom(path: str, settings: str = LEARNS) -> str:
    return f"recipe=yolo_custom data.source.path={path} {settings}"


def written(folder: Path, layout: str) -> Ended:
    """The drawn set, as files in ``folder``."""
    done = ddptrain(folder.parent, f"write recipe=yolo_shapes {SET} layout={layout} out={folder.name}")
    assert done.code == 0, done.err
    return done


def trained_and_moved(folder: Path) -> None:
    """``folder/run``, trained for longer on files that are then gone, but for the eight validation pictures
    in ``folder/pictures``."""
    written(folder / "set", "yolo")
    # while the rate is high, BatchNorm's statistics lag behind and scores are all 1: which of equal ones are
    # kept is chance. So it is low here, and there is one evaluation, at the end
    words = f"train.steps={LONGER} train.eval_every={LONGER} optim.lr=0.005"
    done = ddptrain(folder, f"{custom('set/data.yaml')} {words} run.dir=run", **ONE_THREAD)
    assert done.code == 0, done.err
    shutil.copytree(folder / "set/images/val", folder / "pictures")
    shutil.rmtree(folder / "set")
