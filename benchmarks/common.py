"""What the benchmarks share: chunks that are compared, and tables that say where they were made."""

import contextlib
import platform
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ddptrain.distributed.threads import cores

TOLERANCE = 1e-5
"""How well first losses must agree (relative)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One peer's turn."""

    seconds: float
    """Of a step."""
    losses: list[float]
    """The first ones."""


def compare(name: str, chunk: Chunk, reference: Chunk) -> None:
    """Stop where two peers do not train the same."""
    for step, (own, other) in enumerate(zip(chunk.losses, reference.losses, strict=True), start=1):
        if not abs(own - other) <= TOLERANCE * abs(other):
            raise SystemExit(
                f"{name} trains something else: its loss in step {step} is {own!r}, another peer's {other!r}"
            )


@contextlib.contextmanager
def silent(folder: Path) -> Iterator[None]:
    """What the peers print goes to a file, at about the cost of a terminal."""
    warnings.simplefilter("ignore")
    with (folder / "printed.txt").open("w") as file:
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            yield


def markers(name: str) -> tuple[str, str]:
    """The lines of a Markdown file between which a table belongs."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def check_markers(file: Path, name: str) -> None:
    """Stop where the table would have no place; now, and not after an hour."""
    (begin, end), text = markers(name), file.read_text()
    if not (text.count(begin) == text.count(end) == 1 and text.index(begin) < text.index(end)):
        raise SystemExit(f"{file}: holds no lines {begin} and {end} to write between")


def publish(table: str, name: str, file: Path | None) -> None:
    """Print a table, and put it between a file's markers."""
    print(table)
    if file is not None:
        begin, end = markers(name)
        before, rest = file.read_text().split(begin)
        file.write_text(f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}")


def made_with(*packages: str) -> str:
    """The machine, the versions and the day, without which no figure means anything."""
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in packages)
    count = f"{cores()} core{'s' * (cores() > 1)}"
    day = time.strftime("%Y-%m-%d")
    return f"{_processor()}, {count}; Python {platform.python_version()}, {versions}; {day}."


def _processor() -> str:
    """The CPU's name, which Python's platform module does not know on Linux."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
