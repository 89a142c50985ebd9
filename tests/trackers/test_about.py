"""What of a run's folder is sent to a tracker."""

from pathlib import Path

from ddptrain.tools.trackers.about import about


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
