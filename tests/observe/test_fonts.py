"""Names in letters that Matplotlib's own font lacks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen

NAME = "猫"
DRAW = """
import warnings
warnings.simplefilter("error")
from pathlib import Path
from PIL import Image
from ddptrain.observe.drawing import _drawn
from ddptrain.recipes.sheets import Titled, write_sheet
from ddptrain.text import fonts_for
print([font.family for font in fonts_for("cat {name}")])
Path("matrix.png").write_bytes(_drawn(("matrix", [[1, 0], [0, 1]], ["cat", "{name}"])))
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


@pytest.mark.parametrize("installed", [True, False])
def test_a_font_of_the_machine_is_taken_for_them(tmp_path: Path, installed: bool) -> None:
    if installed:
        font_with(NAME, tmp_path / "share/fonts/squares.ttf")
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path / "share"), "MPLCONFIGDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", DRAW.format(name=NAME)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    if not installed and done.returncode:  # or the machine has one
        assert "['DejaVu Sans']" in done.stdout
        assert "missing from font" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert installed == ("Squares" in done.stdout)
    assert (tmp_path / "sheet.png").stat().st_size > 0
