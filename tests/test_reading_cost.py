"""What has to be read for a change: as docs/architecture.md says."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGINE = ROOT / "ddptrain/engine"
STEP = [
    ENGINE / f"{name}.py" for name in ("step", "health", "loss_scale", "optimizer_step", "phases", "seeding")
]


def lines(*files: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def test_reading_costs_what_the_page_says() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    said = dict(re.findall(r"^\| (\w[^|(]*?)(?: \([^|]*\))? \|.*\| (\d+) \|$", page, re.M))
    found = {
        "change the step": lines(*STEP, ROOT / "ddptrain/api/strategy.py", ROOT / "ddptrain/api/rng.py"),
        **{f"add {what}": lines(ROOT / "docs" / name) for what, name in (
            ("a recipe", "recipes.md"), ("an observer", "observers.md"), ("a controller", "controllers.md"),
            ("a strategy", "strategies.md"))},
    }  # fmt: skip
    assert said.keys() == found.keys()
    for what, count in found.items():
        assert int(said[what]) - 25 < count <= int(said[what]), f"{what}: {count}"
    assert found["change the step"] <= 750
    assert found["add an observer"] <= 60


def test_an_engine_and_a_step_have_few_attributes_and_none_is_born_later() -> None:
    for file, most in ((ENGINE / "loop.py", 12), (ENGINE / "step.py", 18)):
        text = file.read_text()
        constructor = re.search(r"    def __init__\(.*?\n(?=    def )", text, re.S)
        assert constructor is not None
        made = set(re.findall(r"self\.(\w+)(?::[^=]+)? = ", constructor[0]))
        assert made
        assert len(made) <= most
        assigned = set(re.findall(r"self\.(\w+)(?::[^=\n]+)? (?:\|)?= ", text))
        assert assigned <= made, assigned - made
