"""What the documents show is what there is."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import yaml

from ddptrain.config.schema import Config
from ddptrain.version import __version__

ROOT = Path(__file__).parents[2]


def keys(section: Any, prefix: str = "") -> list[str]:
    found = []
    for field in dataclasses.fields(section):
        if dataclasses.is_dataclass(field.type):
            found += keys(field.type, f"{prefix}{field.name}.")
        else:
            found.append(f"{prefix}{field.name}")
    return found


STRATEGIES = ("conf/strategy/auto.yaml", "conf/strategy/strict.yaml")
"""Whose arguments are on that page; those of fsdp have their own."""


def test_every_key_is_documented_and_every_documented_key_exists() -> None:
    page = (ROOT / "docs/config.md").read_text()
    listed = {
        key for row in re.findall(r"^\| (`[^|]+`) \|", page, re.M) for key in re.findall(r"`([^`]+)`", row)
    }
    known = set(keys(Config))
    for file in [*ROOT.glob("conf/sched/*.yaml"), *map(ROOT.joinpath, STRATEGIES)]:
        arguments = yaml.safe_load(file.read_text()).keys() - {"_target_"}
        known |= {f"{file.parent.name}.{name}" for name in arguments}
    assert known <= listed
    assert {key for key in listed if not key.startswith("data.")} <= known


def test_the_code_in_the_docs_is_what_the_tests_train() -> None:
    page = (ROOT / "docs/recipes.md").read_text()
    for file in (
        "my_recipe/my_recipe.py",
        "my_recipe/recipe/my_recipe.yaml",
        "my_data/recordings.py",
        "my_data/data/recordings.yaml",
    ):
        assert (ROOT / "tests/packaging" / file).read_text().strip() in page


def test_every_local_link_leads_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_recipe_is_in_the_list() -> None:
    page = (ROOT / "docs/recipe-list.md").read_text()
    for recipe in ROOT.glob("conf/recipe/*.yaml"):
        assert f"| `{recipe.stem}` |" in page


def test_the_version_is_the_same_everywhere() -> None:
    changes = re.findall(r"^## \[(\d.*?)\] - (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert changes[0] == (__version__, citation["date-released"])
    assert citation["version"] == __version__


def test_no_file_names_a_registry_or_a_path_of_one_machine() -> None:
    hosts = ["pypi" + ".org", "files.python" + "hosted", "download.pytorch" + ".org"]
    paths = ["/work" + "/", "/opt" + "/venv", "/home" + "/"]
    for path in [*ROOT.glob("*.*"), *ROOT.glob("*/**/*.*")]:
        inner = path.relative_to(ROOT)
        if path.suffix in (".py", ".md", ".yaml", ".toml", ".sh") and not inner.parts[0].startswith("."):
            text = path.read_text()
            assert not [name for name in (*hosts, *paths) if name in text], inner
