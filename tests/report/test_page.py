"""The page: one file that loads nothing and lets no stranger's text be anything but text."""

import json
import re
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from ddptrain.tools.report.page import page, write_page
from ddptrain.tools.report.run_files import read_run

MakeRun = Callable[..., Path]
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e\x1b[2J"


class Seen(HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "img", "line", "circle", "rect", "polyline", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("line", "circle", "rect", "polyline"):
            return
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))


def shown(*folders: Path, title: str = "title") -> str:
    return page([read_run(folder, folder.name) for folder in folders], title, [])


def seen(html: str) -> Seen:
    parser = Seen()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return parser


def test_nothing_is_loaded_from_anywhere(make_run: MakeRun) -> None:
    folder = make_run("a")
    Image.new("RGB", (50, 40), "red").save(folder / "plots/confusion.png")
    html = shown(folder, make_run("b"))
    assert "http://" not in html
    assert "https://" not in html
    for tag, attributes in seen(html).tags:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert (attributes.get(name) or "data:").startswith("data:"), tag
        assert not [name for name in attributes if name.startswith("on")]
        assert "style" not in attributes
    assert "@import" not in html
    assert not re.search(r"url\(", html)
    assert "default-src 'none'" in html


def test_a_strangers_text_is_text(make_run: MakeRun) -> None:
    folder = make_run(
        "<b>evil", verdict=EVIL, outcome=EVIL, time={EVIL: 1.0}, devices={EVIL: {"mean": {EVIL: EVIL}}}
    )
    (folder / "config.yaml").write_text(json.dumps({"recipe": EVIL, EVIL: EVIL}))
    (folder / "command.txt").write_text(EVIL)
    (folder / "environment.json").write_text(json.dumps({EVIL: EVIL}))
    (folder / "plots/sample.txt").write_text(EVIL)
    line = {"step": 1, "epoch": 1, "split": EVIL, EVIL.replace("/", ""): 1.0, EVIL: 2.0}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    for html in (shown(folder, title=EVIL), shown(folder, make_run("b"), title=EVIL)):
        assert [tag for tag, _ in seen(html).tags].count("script") == 2
        assert "<b>" not in html
        assert not [tag for tag, attributes in seen(html).tags if tag == "img"]
        assert "\x1b" not in html
        assert "\u202e" not in html
        data = html.split('id="data">')[1].split("</script>")[0]
        assert json.loads(data)["runs"][0] == "<b>evil"


def test_unicode_and_blanks(make_run: MakeRun) -> None:
    folder = make_run("größer als 2, 日本")
    (folder / "plots/sample.txt").write_text("def f():\n\treturn 'ñ'\n")
    html = shown(folder)
    assert "größer als 2, 日本" in html
    assert "def f():\n\treturn &#x27;ñ&#x27;" in html


def test_ten_thousand_lines_are_a_small_page_soon(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run("a", lines=10_000)
    began = time.process_time()
    write_page([read_run(folder, "a")], "a", [], tmp_path / "report.html")
    assert time.process_time() - began < 5
    assert (tmp_path / "report.html").stat().st_size < 2_000_000
    assert "Long curves are thinned" in (tmp_path / "report.html").read_text()
    assert "Long curves are thinned" not in shown(make_run("short"))


def test_curves_and_tables_are_there_without_the_script(make_run: MakeRun) -> None:
    html = shown(make_run("a"), make_run("b", lr=0.2)).split('<script type="application/json"')[0]
    plots = [
        attributes
        for tag, attributes in seen(html + "</body></html>").tags
        if tag == "svg" and attributes.get("class") == "plot"
    ]
    assert [str(plot["aria-label"]).split()[0] for plot in plots] == ["loss", "accuracy", "lr"]
    assert all(plot["role"] == "img" for plot in plots)
    assert html.count("<polyline") == 2 * 4
    assert "waiting for data 32%: data.workers=4" in html
    assert "optim.lr" in html


def test_pictures_are_inside_and_small(make_run: MakeRun) -> None:
    folder = make_run("a")
    Image.effect_noise((3000, 2000), 90).convert("RGB").save(folder / "plots/predictions.png")
    Image.new("RGB", (60, 40), "red").save(folder / "plots/confusion.png")
    Image.new("RGB", (60, 40), "red").save(folder / "plots/curves.png")
    (folder / "plots/broken.png").write_bytes((folder / "plots/confusion.png").read_bytes()[:60])
    (folder / "plots/other.png").write_text("<svg onload=alert(1)>")
    html = shown(folder)
    pictures = [attributes for tag, attributes in seen(html).tags if tag == "img"]
    assert [picture["alt"] for picture in pictures] == ["confusion", "predictions"]
    assert str(pictures[0]["src"]).startswith("data:image/png;base64,")
    assert str(pictures[1]["src"]).startswith("data:image/jpeg;base64,")
    assert int(str(pictures[1]["width"])) == 1400
    assert len(html) < 3_000_000
    assert "Not shown: a: plots/broken.png, a: plots/other.png." in html


def test_a_long_text_is_cut(make_run: MakeRun) -> None:
    folder = make_run("a")
    (folder / "plots/sample.txt").write_text("x" * 100_000)
    assert shown(folder).count("x" * 1000) == 20
    assert "(cut here)" in shown(folder)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_part_has_its_place(make_run: MakeRun, count: int) -> None:
    gpus = {f"gpu{rank}": {"name": "H100", "mean": {"utilisation": 91.0 + rank}} for rank in range(2)}
    used = {"least_used": {"rank": 0, "utilisation": 91.0}, "most_used": {"rank": 1, "utilisation": 92.0}}
    devices = {**gpus, **used}
    html = shown(*(make_run(f"{i}", lr=0.1 * i, mfu=0.31, devices=devices) for i in range(count)))
    titles = re.findall("<h2>(.*?)</h2>", html)
    expected = [
        "Metrics",
        "Curves",
        "Where the time went",
        "Devices",
        "Evaluation in detail",
        "Configuration",
    ]
    assert titles == ["What differs"] * (count > 1) + [*expected, "Environment", "Repeat it"]
    assert html.count('class="copy') == count
    assert html.count('<rect class="f') == 4 * count
    assert "least used: the GPU of rank 0 (91 %), most used: the GPU of rank 1 (92 %)" in html
    assert "31.0%" in html
