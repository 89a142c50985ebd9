"""Reads metrics.jsonl. Imports no torch."""

from pathlib import Path
from typing import Any

from ddptrain.text import parse_json

POSITION = ("step", "epoch", "samples", "split")
"""What each line has beside the values that were logged."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, up to one that was cut short by a kill or is damaged."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_bytes().splitlines():
        try:
            lines.append(parse_json(text))
        except ValueError:
            break
    return lines
