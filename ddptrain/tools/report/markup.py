"""HTML for reports: escaped texts, tables, and the document around them."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from ddptrain.tools.report.comparison import NOTHING
from ddptrain.tools.report.curves import COLOURS
from ddptrain.tools.report.page_look import STYLE
from ddptrain.tools.report.page_script import SCRIPT
from ddptrain.tools.report.run_files import RunFiles
from ddptrain.version import __version__

_GENERATOR = '<meta name="generator" content="ddptrain'
_HEAD = 4096
"""Characters of a page that hold its generator."""


class Html(str):
    """Text that is HTML already: the only one that is not escaped."""


def is_page(file: Path) -> bool:
    """Whether a file is such a page, of any version."""
    with file.open(encoding="utf-8", errors="replace") as page:
        return _GENERATOR in page.read(_HEAD)


def document(title: str, body: str, data: Mapping[str, object]) -> str:
    """The page. Its policy allows its own script and style only, by their hashes, and no address at all."""
    inert = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")
    policy = (
        f"default-src 'none'; img-src data:; script-src {hash_of(SCRIPT)}; style-src {hash_of(STYLE)};"
        " base-uri 'none'; form-action 'none'"
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
{_GENERATOR} {__version__}">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{inert}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def hash_of(text: str) -> str:
    """As a policy names a script or a style that stands in the page."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>" if body else ""


Row = tuple[str, Sequence[str | None]]
"""Its name and its cells."""


def html_table(corner: str, columns: Sequence[str], rows: Sequence[Row], looks: str = "") -> str:
    """``looks``: ``number`` for cells of numbers, ``fact`` for short ones, ``differs`` to mark them."""
    kind = f' class="{looks}"' if looks else ""
    side = kind if looks == "number" else ""
    head = "".join(f'<th scope="col"{side}>{_cell(name)}</th>' for name in columns)
    body = "".join(
        f'<tr><th scope="row">{_cell(name)}</th>'
        + "".join(f"<td{kind}>{_cell(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, cells in rows
    )
    top = f'<thead><tr><th scope="col">{escape(corner)}</th>{head}</tr></thead>'
    frame = '<div class="scroll" tabindex="0" role="region" aria-label="table">'
    return f"{frame}<table>{top}<tbody>{body}</tbody></table></div>"


def folded(summary: str, body: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def colour_key(run: int, runs: Sequence[RunFiles]) -> Html:
    """The colour of a run's curves, where there are several."""
    return Html(f'<span class="key k{run % COLOURS}"></span>' if len(runs) > 1 else "")


def run_names(runs: Sequence[RunFiles]) -> list[Html]:
    """The runs' names, each with its colour."""
    return [Html(colour_key(i, runs) + escape(run.name)) for i, run in enumerate(runs)]


def run_prefix(run: RunFiles, runs: Sequence[RunFiles]) -> str:
    """Of which of several runs something is said."""
    return f"<strong>{escape(run.name)}</strong>: " if len(runs) > 1 else ""


def _cell(text: str | None) -> str:
    return NOTHING if text is None else text if isinstance(text, Html) else escape(text)
