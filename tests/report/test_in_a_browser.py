"""The page in a real browser: nothing asked for, nothing complained of, and what its switches do.

Where DDPTRAIN_SCREENSHOTS names a folder, pictures of the page are left there, to be looked at.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import Browser, Tab
from PIL import Image

from ddptrain.tools.report.page import write_page
from ddptrain.tools.report.run_files import read_run

pytestmark = pytest.mark.browser
MakeRun = Callable[..., Path]
LINES = "[...document.querySelectorAll('.plot polyline')].map((line) => line.getAttribute('points'))"


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    with browser.tab() as tab:
        yield tab
        assert tab.complaints == []
        assert [url for url in tab.requests if not url.startswith("file:")] == []
        assert len(tab.requests) == 1, "the page is one file"


def format_value(home: Path, *folders: Path) -> str:
    """The address of a page on these runs."""
    write_page([read_run(folder, folder.name) for folder in folders], "runs", [], home / "page.html")
    return (home / "page.html").as_uri()


def click(tab: Tab, selector: str) -> None:
    tab.evaluate(f"document.querySelector({json.dumps(selector)}).click()")


def panel(tab: Tab, name: str) -> str:
    """The selector of the figure with this title."""
    found = f"find((figure) => figure.querySelector('h3')?.textContent === '{name}')"
    return "#" + str(tab.evaluate(f"[...document.querySelectorAll('figure')].{found}.id"))


def test_curves_are_drawn(tab: Tab, make_run: MakeRun, tmp_path: Path) -> None:
    tab.open(format_value(tmp_path, make_run("a"), make_run("b", lr=0.3, seed=1), make_run("c", seed=2)))
    assert tab.evaluate("[...document.querySelectorAll('figure h3')].map((h) => h.textContent)") == [
        "loss",
        "accuracy",
        "lr",
    ]
    lines = tab.evaluate(LINES)
    assert len(lines) == 3 * 4
    assert sorted({len(line.split()) for line in lines}) == [10, 20]
    assert "NaN" not in "".join(lines)


def test_the_script_draws_what_stands_there_without_it(tab: Tab, make_run: MakeRun, tmp_path: Path) -> None:
    address = format_value(tmp_path, make_run("a"), make_run("b", lr=0.003, seed=1))
    tab.call("Emulation.setScriptExecutionDisabled", value=True)
    tab.open(address)
    drawn = tab.evaluate("document.querySelector('.plot').getBoundingClientRect().height > 100 && " + LINES)
    words = "[...document.querySelectorAll('.plot text')].map((text) => text.textContent)"
    said = tab.evaluate(words)
    tab.call("Emulation.setScriptExecutionDisabled", value=False)
    tab.reload()
    tab.wait_for("document.documentElement.classList.contains('with-script')")
    assert tab.evaluate(LINES) == drawn
    assert tab.evaluate(words) == said
    tab.requests.pop()


def test_a_run_is_switched_off_and_on(tab: Tab, make_run: MakeRun, tmp_path: Path) -> None:
    tab.open(format_value(tmp_path, make_run("a"), make_run("b", lr=0.3, seed=1)))
    before = tab.evaluate(LINES)
    click(tab, "button.run[data-run='1']")
    assert len(tab.evaluate(LINES)) == len(before) // 2
    assert tab.evaluate("document.querySelectorAll('.series.c1').length") == 0
    assert (
        tab.evaluate("document.querySelector('button.run[data-run=\"1\"]').getAttribute('aria-pressed')")
        == "false"
    )
    click(tab, "button.run[data-run='0']")
    assert tab.evaluate(LINES) == []
    click(tab, "button.run[data-run='0']")
    click(tab, "button.run[data-run='1']")
    assert tab.evaluate(LINES) == before


def test_axes(tab: Tab, make_run: MakeRun, tmp_path: Path) -> None:
    tab.open(format_value(tmp_path, make_run("a")))
    loss = panel(tab, "loss")
    ticks = f"[...document.querySelectorAll('{loss} text')].map((text) => text.textContent)"
    before = tab.evaluate(ticks)
    assert before[-1] == "step"
    assert "200" in before
    click(tab, "button.across[data-across='epoch']")
    assert tab.evaluate(ticks)[-1] == "epoch"
    assert "200" not in tab.evaluate(ticks)
    click(tab, f"{loss} button.log")
    assert {"0.2", "0.5", "1"} <= set(tab.evaluate(ticks))
    assert "NaN" not in "".join(tab.evaluate(LINES))
    click(tab, f"{loss} button.log")
    click(tab, "button.across[data-across='step']")
    assert tab.evaluate(ticks) == before


def test_values_are_read_where_the_pointer_is(tab: Tab, make_run: MakeRun, tmp_path: Path) -> None:
    tab.open(format_value(tmp_path, make_run("a"), make_run("<i>b", seed=1)))
    middle = "(({x, y, width, height}) => [x + width / 2, y + height / 2])"
    x, y = tab.evaluate(f"{middle}(document.querySelector('.plot').getBoundingClientRect())")
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    read = tab.wait_for("document.querySelector('.reading:not([hidden])')?.innerText")
    assert read.startswith("step ")
    assert "a train: 0." in read
    assert tab.evaluate("document.querySelector('.reading:not([hidden])').offsetTop") > 200, (
        "it hides no curve"
    )
    assert "<i>b valid: 0." in read
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert tab.evaluate("document.querySelectorAll('.reading:not([hidden])').length") == 0


def test_the_command_is_copied(tab: Tab, make_run: MakeRun, tmp_path: Path) -> None:
    tab.open(format_value(tmp_path, make_run("a")))
    tab.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    tab.evaluate("window.focus()")
    click(tab, "button.copy")
    assert tab.wait_for("document.querySelector('button.copy').textContent === 'copied'")
    copied = "navigator.clipboard.readText()"
    assert tab.evaluate(copied) == "python -m ddptrain recipe=toy optim.lr=0.1"


def test_ten_thousand_lines_open_at_once(tab: Tab, make_run: MakeRun, tmp_path: Path) -> None:
    seconds = tab.open(
        format_value(tmp_path, make_run("a", lines=10_000), make_run("b", lines=10_000, seed=1))
    )
    assert seconds < 2
    assert max(len(line.split()) for line in tab.evaluate(LINES)) > 900
    began = tab.evaluate("performance.now()")
    click(tab, "button.run")
    assert tab.evaluate("performance.now()") - began < 2000


def test_a_strangers_text_does_nothing(tab: Tab, make_run: MakeRun, tmp_path: Path) -> None:
    evil = "</script><script>document.title='evil'</script><img src=x onerror=\"document.title='evil'\">"
    folder = make_run("a", verdict=evil)
    (folder / "config.yaml").write_text(json.dumps({"recipe": evil}))
    (folder / "plots/sample.txt").write_text(evil)
    other = make_run("b")
    line = {"step": 1, "epoch": 1, "split": "train", evil.replace("/", "|"): 2.0}
    (other / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    tab.open(format_value(tmp_path, folder, other))
    click(tab, "button.run")
    assert tab.evaluate("document.title") == "runs"
    assert tab.evaluate("document.querySelectorAll('img, script').length") == 2
    assert "onerror" in tab.evaluate("document.body.innerText")


def test_whatever_else_came_in_would_not_run(browser: Browser, make_run: MakeRun, tmp_path: Path) -> None:
    """The policy is the second line, behind the escaping."""
    address = format_value(tmp_path, make_run("a"))
    page = tmp_path / "page.html"
    evil = "document.title='evil'"
    worse = f"<script>{evil}</script><img src='http://127.0.0.1:9/x.png' onerror=\"{evil}\"></body>"
    page.write_text(page.read_text().replace("</body>", worse))
    with browser.tab() as tab:
        tab.open(address)
        assert tab.evaluate("document.title") == "runs"
        assert len([complaint for complaint in tab.complaints if "Content Security Policy" in complaint]) >= 2


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("count", [1, 3])
def test_how_it_looks(
    tab: Tab, make_run: MakeRun, tmp_path: Path, count: int, width: int, dark: bool
) -> None:
    folders = [make_run(f"run {i}", lr=0.1 * (i + 1), lines=200, seed=i) for i in range(count)]
    tab.resize(width, 900, dark)
    tab.open(format_value(tmp_path, *folders))
    assert tab.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
    picture = tmp_path / "page.png"
    tab.screenshot(picture, whole=True)
    with Image.open(picture) as image:
        corner = image.convert("L").getpixel((2, 2))
        assert image.width == width
    assert isinstance(corner, int)
    assert corner < 60 if dark else corner > 230
    if home := os.environ.get("DDPTRAIN_SCREENSHOTS"):
        name = f"report-{count}-{width}-{'dark' if dark else 'light'}.png"
        Path(home, name).write_bytes(picture.read_bytes())
