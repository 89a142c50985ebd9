"""Words that ``bench`` does not take."""

from pathlib import Path

import pytest
from shell import refusal


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rounds=1"], "rounds=1: must be 3 or more."),
        (["steps=x"], "steps=x: must be a whole number"),
        (["stops=3"], "stops: bench takes no such word. Did you mean steps?"),
        (["run.dir=here"], "run.dir=here: bench decides that itself; leave it out."),
        (["try=log.every=1"], "log.every=1: bench decides that itself; leave it out."),
        (["try=train.batch_size=8;foo"], "try=foo: is no override. Give key=value"),
        (
            ["ddp=true", "strategy=dp"],
            "strategy._target_=ddptrain.strategies.dp.DataParallel: ddp=true measures",
        ),
        (["ddp=true", "device=cuda:1"], "ddp=true: there is one GPU to use"),
        (["optim.lrr=1"], "optim.lrr: there is no such key."),
        (["--multirun"], "bench: starts the trainings that it compares"),
    ],
)
def test_wrong_words_are_one_message(tmp_path: Path, words: list[str], said: str) -> None:
    assert refusal(tmp_path, ["bench", "recipe=cnn_digits", *words]).startswith(said)
