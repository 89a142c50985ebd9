"""Parsing of files that anybody may have written: whatever is wrong with them is a ValueError."""

import json
from collections.abc import Callable
from typing import Any


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
