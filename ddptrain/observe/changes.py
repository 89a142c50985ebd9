"""What of a run's config is another one since a resume. Imports no torch, for reports."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddptrain.keys import flat_values
from ddptrain.text import parse_yaml

CHANGES = "changes.jsonl"
"""In the run's folder."""
_OF_ONE_START = ("run.", "sweep.")
log = logging.getLogger("ddptrain")


def note_changes(folder: Path, tree: Mapping[str, Any], step: int) -> Mapping[str, Any]:
    """A line in ``changes.jsonl`` where the run has had another config up to this step. Returns the config to
    keep: what a run starts from stays as it was."""
    path = folder / "config.yaml"
    if not step or not path.is_file():
        return tree
    try:
        saved = parse_yaml(path.read_text())
    except ValueError:
        saved = None
    if not isinstance(saved, dict) or "init" not in saved:  # damaged; it is written anew
        return tree
    if saved["init"] != tree["init"]:
        log.warning("note       init.*: has no effect, for the run goes on from step %d", step)
        tree = {**tree, "init": saved["init"]}
    before, now = flat_values(saved), flat_values(tree)
    keys = [key for key in {**before, **now} if not key.startswith(_OF_ONE_START)]
    changed = {key: [before.get(key), now.get(key)] for key in keys if before.get(key) != now.get(key)}
    if changed:
        for key, (old, new) in changed.items():
            log.info("changed    %s=%s (up to step %d: %s)", key, new, step, old)
        with (folder / CHANGES).open("a") as file:
            file.write(json.dumps({"step": step, "changed": changed}) + "\n")
    return tree
