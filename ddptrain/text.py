"""Texts: JSON and YAML that anybody may have written, words and tables for people."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

PLAIN_WIDTH = 160
"""Columns of a table where there is no terminal: a file, a pipe."""


def counted(number: int, thing: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {thing}{'s' * (number != 1)}"


def first_few(names: Sequence[str], most: int) -> str:
    """``a, b and 3 more``; '' without any."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, its words below those of the others."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def print_tables(*tables: Any) -> None:
    """Tables of rich's on standard output, as wide as the terminal."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    with console.capture() as drawn:
        for table in tables:
            console.print(table, highlight=False)
    for line in drawn.get().splitlines():  # rich fills its lines with blanks
        print(line.rstrip())


def parse_json(text: str | bytes, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """``json.loads``. Raises ValueError, also for what is nested too deeply."""
    try:
        return json.loads(text, object_hook=object_hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_yaml(text: str) -> Any:
    """Plain values only. Raises ValueError, with the place where there is one."""
    import yaml

    try:
        return yaml.safe_load(text)  # not CSafeLoader, which crashes the process where nesting is deep
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{place}{getattr(error, 'problem', None) or error}") from error
