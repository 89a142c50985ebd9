"""Texts: JSON and YAML that anybody may have written, words and tables for people, fonts to draw them."""

import json
import logging
import math
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_ended = logging.getLogger("ddptrain.ended")
"""For the run's log.txt alone."""
_ended.addHandler(logging.NullHandler())
_MOST_CHARACTERS = 200_000
PLAIN_WIDTH = 160
"""Columns of a table where there is no terminal: a file, a pipe."""


SAVED = "all is saved"
"""Begins the last words of a run that is stopped while observers end."""


def counted(number: int, thing: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {thing}{'s' * (number != 1)}"


def named_ranks(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 2, 3``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def say(message: str) -> None:
    """A line on standard error, in one piece: `print` writes its end by itself where torchrun runs Python
    unbuffered, and lines of several ranks then run together."""
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


def last_words(message: str, shown: bool = True) -> None:
    """What ends this process, on standard error (if ``shown``) and in the log.txt of the run that it
    writes."""
    if shown:
        say(f"ddptrain: {message}")
    _ended.error("ended      %s", message)


def plain(value: object) -> str:
    """Text for a terminal or a page: control characters, which could rewrite either, are shown as such."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(value)[:_MOST_CHARACTERS])


def quoted(text: str) -> str:
    """A text as the value of an override, whatever characters it has: Hydra drops a backslash only before a
    quote and at the end."""
    escaped = re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), text)
    return f"'{escaped}'"


def quoted_if_needed(text: Path | str) -> str:
    """The same, plain where it can be: letters beyond ASCII are none to Hydra's grammar."""
    return str(text) if re.fullmatch(r"[\w./-]+", str(text), re.ASCII) else quoted(str(text))


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
    with console.capture() as output:
        for table in tables:
            console.print(table, highlight=False)
    for line in output.get().splitlines():  # rich fills its lines with blanks
        print(line.rstrip())


def finite(value: Any) -> Any:
    """A value for JSON, which has no other numbers: None in the place of NaN and infinities."""
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_json(text: str | bytes, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """``json.loads``. Raises ValueError, also for what is nested too deeply."""
    try:
        return json.loads(text, object_hook=object_hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def json_object(path: Path) -> dict[str, Any]:
    """What a file holds that another process writes; empty where there is none, or it is damaged."""
    with suppress(OSError, ValueError):
        content = parse_json(path.read_text())
        return content if isinstance(content, dict) else {}
    return {}


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: others may read it at any time. Raises OSError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    aside.unlink(missing_ok=True)  # of a killed process of this number
    try:
        with aside.open("xb") as file:  # x: follows no link, which a stranger may have put there
            file.write(content.encode(errors="replace") if isinstance(content, str) else content)
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def as_yaml(tree: Any) -> str:
    """Plain values as YAML, in their order."""
    import yaml

    written: str = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    return written


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


class Font(NamedTuple):
    family: str
    file: str


def fonts_for(text: str) -> list[Font]:
    """Matplotlib's own DejaVu Sans, and for the letters that it lacks others that are installed, such as Noto
    Sans CJK. A letter that none of them has (`letters_without_font`) is drawn as a box."""
    return _fonts_for(text)[0]


def letters_without_font(text: str) -> str:
    """Those of its letters that no font of the machine has, in their order in Unicode."""
    return "".join(map(chr, sorted(_fonts_for(text)[1])))


def _fonts_for(text: str) -> tuple[list[Font], set[int]]:
    from matplotlib import font_manager

    own = font_manager.findfont("DejaVu Sans")
    chosen, missing = [Font("DejaVu Sans", own)], _letters(text) - _letters_of(own)
    # Last Resort has a frame for every letter, and the letter for none
    known = [font for font in font_manager.fontManager.ttflist if not font.name.startswith("Last Resort")]
    for font in sorted(known, key=lambda font: font.fname) if missing else ():
        if (font.style, font.weight) == ("normal", 400) and (covered := missing & _letters_of(font.fname)):
            chosen.append(Font(font.name, font.fname))
            missing -= covered
    return chosen, missing


def _letters(text: str) -> set[int]:
    return {ord(letter) for letter in text if unicodedata.category(letter)[0] not in "CZ"}


@cache
def _letters_of(file: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(file).get_charmap())
