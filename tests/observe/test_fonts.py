"""Names in letters that Matplotlib's own font lacks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen

from ddptrain.api.recipe import ConfusionMatrix
from ddptrain.observe.drawer import Drawer

NAME = "猫"
DRAW = """
import logging, sys, warnings
warnings.simplefilter("error")
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
from pathlib import Path
from PIL import Image
from ddptrain.api.recipe import ConfusionMatrix, Curves
from ddptrain.observe.drawer import Drawer
from ddptrain.recipes.sheets import Titled, write_sheet
from ddptrain.text import fonts_for
print([font.family for font in fonts_for("cat {name}")])
drawer = Drawer()
for round in range(2):
    for file, name in (("named", "{name}"), ("numbered", "#1")):
        figures = (
            ConfusionMatrix([[1, 0], [0, 1]], ["cat", name]),
            Curves({{"cat": [(0, 1), (1, 0)], name: [(0, 1), (1, 1)]}}, "recall", "precision"),
        )
        for figure in figures:
            target = Path(f"{{file}}-{{type(figure).__name__}}.png")
            drawer.draw(target.stem, figure, target.write_bytes)
    drawer.finish()
Image.new("RGB", (20, 20)).save("a.png")
write_sheet(Path("sheet.png"), [Titled(Path("a.png"), "{name}")])
"""


def font_with(letter: str, path: Path) -> None:
    """In which the letter is a black square, and there is no other."""
    pen = TTGlyphPen(None)
    for at in ((50, 0), (50, 900), (950, 900), (950, 0)):
        (pen.moveTo if at == (50, 0) else pen.lineTo)(at)
    pen.closePath()
    font = FontBuilder(1000, isTTF=True)
    font.setupGlyphOrder([".notdef", "own"])
    font.setupCharacterMap({ord(letter): "own"})
    font.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "own": pen.glyph()})
    font.setupHorizontalMetrics({".notdef": (500, 0), "own": (1000, 50)})
    font.setupHorizontalHeader(ascent=900, descent=-100)
    font.setupNameTable({"familyName": "Squares", "styleName": "Regular", "fullName": "Squares"})
    font.setupOS2()
    font.setupPost()
    path.parent.mkdir(parents=True)
    font.save(path)


@pytest.mark.parametrize("installed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_font_of_the_machine_is_taken_for_them(tmp_path: Path, installed: bool) -> None:
    if installed:
        font_with(NAME, tmp_path / "share/fonts/squares.ttf")
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path / "share"), "MPLCONFIGDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", DRAW.format(name=NAME)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no warnings of the drawing process
    if not installed and "['DejaVu Sans']" not in done.stdout:
        pytest.skip("NOT SEEN: a machine without a font for it; this one has one")
    assert installed == ("Squares" in done.stdout)
    assert done.stdout.count(f"no font on this machine has {NAME}") == (not installed)  # of four figures
    for kind in ("ConfusionMatrix", "Curves"):
        named, numbered = (tmp_path / f"{which}-{kind}.png" for which in ("named", "numbered"))
        assert installed != (named.read_bytes() == numbered.read_bytes())
    assert (tmp_path / "sheet.png").stat().st_size > 0


def test_a_dollar_in_a_name_is_no_formula() -> None:
    drawer, drawn = Drawer(), list[bytes]()
    for names in (["$\\foo$", "b"], ["$x$", "b"], ["x", "b"]):
        drawer.draw(names[0], ConfusionMatrix([[1, 0], [0, 1]], names), drawn.append)
    drawer.finish()
    assert len(set(drawn)) == 3
