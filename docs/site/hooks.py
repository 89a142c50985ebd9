"""What makes a site of the pages: those that lie elsewhere in the repository, and links out of docs/."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Pages of the repository outside of docs/, and what they are called on the site."""
_SOURCES = {page: source for source, page in _ELSEWHERE.items()}
_COMMENT = re.compile(r"<!--.*?-->")  # ends a table for Python-Markdown
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    repository = Path(config.config_file_path).parent
    for source, page in _ELSEWHERE.items():
        files.append(File.generated(config, page, content=(repository / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    folder = posixpath.dirname(_SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def of_the_site(link: re.Match[str]) -> str:
        """A link to a file that the site has not, the code's, becomes its text."""
        text, target, anchor = link.groups()
        if "://" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in _ELSEWHERE:
            return f"[{text}]({_ELSEWHERE[path]}{anchor or ''})"
        return f"[{text}]({path.removeprefix('docs/')}{anchor or ''})" if path.startswith("docs/") else text

    return _LINK.sub(of_the_site, _COMMENT.sub("", markdown))
