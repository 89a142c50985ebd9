"""What of a run's folder is sent to a tracker."""

import fcntl
import json
from pathlib import Path

from ddptrain.tools.trackers.about import about
from ddptrain.tools.trackers.send import locked


def test_a_strangers_links_are_not_sent(tmp_path: Path) -> None:
    secret, run = tmp_path / "secret", tmp_path / "run"
    secret.mkdir()
    for name in ("key.txt", "picture.png"):
        (secret / name).write_text("password")
    (run / "plots").mkdir(parents=True)
    for name in ("curves.png", "sample.txt", "environment.json"):
        (run / ("plots" if "json" not in name else ".") / name).write_text("{}")
    (run / "config.yaml").write_text("recipe: x\n")
    (run / "summary.json").symlink_to(secret / "key.txt")
    (run / "command.txt").symlink_to(secret / "key.txt")
    (run / "plots/key.txt").symlink_to(secret / "key.txt")
    known = about(run, "wandb")
    assert [path.name for path in known.documents()] == ["config.yaml", "environment.json"]
    assert [path.name for path in known.plots()] == ["curves.png", "sample.txt"]
    assert known.command == ""
    (run / "plots").rename(run / "own")
    (run / "plots").symlink_to(secret)
    assert known.plots() == []


def test_a_checkpoint_that_is_or_holds_a_link_is_not_sent(tmp_path: Path) -> None:
    secret, run = tmp_path / "secret", tmp_path / "run"
    secret.mkdir()
    (secret / "key.txt").write_text("password")
    (run / "trackers").mkdir(parents=True)
    (run / "config.yaml").write_text("recipe: x\n")
    for name in ("best", "step-2", "step-10", "step-10.bak"):
        (run / "checkpoints" / name).mkdir(parents=True)
    for chosen, expected in (("best", "best"), ("last", "step-10")):
        (run / "trackers/wandb.json").write_text(json.dumps({"checkpoints": chosen}))
        known = about(run, "wandb")
        assert known.checkpoint() == run / "checkpoints" / expected
        (run / "checkpoints" / expected / "state.pt").symlink_to(secret / "key.txt")
        assert known.checkpoint() is None
    (run / "checkpoints").rename(run / "own")
    (run / "checkpoints").symlink_to(secret)
    assert known.checkpoint() is None


def test_a_lock_that_is_a_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "run/trackers").mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text("recipe: x\n")
    for name in ("run", "mlflow"):
        (tmp_path / f"run/trackers/{name}.lock").symlink_to(tmp_path / "notes.txt")
    about(tmp_path / "run", "mlflow")
    locked(tmp_path / "run", "mlflow", fcntl.LOCK_EX).close()
    assert (tmp_path / "notes.txt").read_text() == "mine"
