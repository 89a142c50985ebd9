"""The documentation as a site: built strictly, and read in a real browser."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import Browser

pytest.importorskip("mkdocs", reason="pip install -e '.[test,docs]'")
pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address under which the built pages are served."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    ended = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert len(list(folder.rglob("index.html"))) > len(list(ROOT.glob("docs/*.md")))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize(
    ("asked", "page", "text"),
    [
        ("hang_timeout", "reliability/", "hang_timeout"),
        ("torchmetrics", "fit/", "ddptrain.fit"),
        ("Kubernetes", "launching/", "Kubernetes"),
        ("higher_is_better", "api/", "Task"),
    ],
)
def test_a_page_is_found_by_its_search(asked: str, page: str, text: str, site: str, browser: Browser) -> None:
    with browser.tab() as tab:
        tab.open(site)
        tab.evaluate("document.querySelector('label.md-header__button[for=__search]').click()")
        tab.evaluate(f"""
            const field = document.querySelector(".md-search__input");
            field.focus();
            field.value = "{asked}";
            field.dispatchEvent(new KeyboardEvent("keyup", {{bubbles: true}}));
        """)
        links = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
        hits = tab.wait_for(f"{links}.length && {links}")
        assert any(hit.startswith(site + page) for hit in hits), hits
        tab.open(next(hit for hit in hits if hit.startswith(site + page)))
        assert text in tab.text()
        assert tab.complaints == []
        assert all(request.startswith(site) for request in tab.requests), "no page asks another host"


def test_pages_have_a_menu_a_picture_and_two_schemes(site: str, browser: Browser) -> None:
    for dark, scheme in ((False, "default"), (True, "slate")):
        with browser.tab(dark=dark) as tab:
            tab.open(site)
            tab.evaluate("localStorage.clear()")  # what the other scheme's visit has left
            tab.reload()
            assert tab.evaluate("document.body.dataset.mdColorScheme") == scheme
            tab.wait_for("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
            assert tab.evaluate("document.querySelectorAll('.md-nav__link').length") > 30
            assert tab.complaints == []
