"""What the hour has found, as Markdown and as pictures."""

import shutil
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_parts import plots
from gpu_parts.losses import FIRST, LATER
from gpu_parts.machine import is_simulated
from gpu_parts.modes import MODES
from gpu_parts.plan import PARTS

NAME = "gpu"
"""Of the markers."""
Results = Mapping[str, Any]


def write(results: Results, out: Path) -> None:
    """report.md and its pictures."""
    pictures = plots.draw(results, out)
    lines = [
        "# An hour on a GPU",
        "",
        *_tables(results),
    ]
    lines += [line for picture in pictures for line in ("", f"![{picture.stem}]({picture.name})")]
    (out / "report.md").write_text("\n".join(lines) + "\n")


def publish_in(results: Results, out: Path, file: Path) -> None:
    """The same in a page of the docs, with the pictures beside. Refuses what a simulated device gave."""
    from common import check_markers, publish

    check_markers(file, NAME)
    if results["small"] or is_simulated(_lacks(results)):
        why = "made with --small" if results["small"] else "the device is a simulated one"
        raise SystemExit(f"--write: these results say nothing of a GPU, for {why}")
    lines = _tables(results)
    images = file.parent / "images"
    for picture in plots.draw(results, out):
        shutil.copy(picture, images / f"gpu-{picture.name}")
        lines += ["", f"![{picture.stem}](images/gpu-{picture.name})"]
    publish(
        "\n".join([*lines, "", f"Made by `python benchmarks/gpu.py`; {time.strftime('%Y-%m-%d')}."]),
        NAME,
        file,
    )


def counted(results: Results) -> str:
    counts = Counter(part["verdict"] for part in results["parts"].values())
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())


def _lacks(results: Results) -> Mapping[str, str]:
    lacks: Mapping[str, str] = results["parts"].get("machine", {}).get("figures", {}).get("lacks", {})
    return lacks


def _tables(results: Results) -> list[str]:
    lines = _table(results)
    for more in (_losses, _beside, _speeds, _modes):
        lines += ["", *more(results)]
    return lines


def _table(results: Results) -> list[str]:
    parts = results["parts"]
    known = parts.get("machine", {}).get("figures", {})
    facts = known.get("facts", {})
    versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
    lines = [
        f"{'; '.join(facts.get('gpus', ['no GPU']))}; {facts.get('processor')}, {facts.get('cores')} cores;"
        f" Python {facts.get('python')}, {versions}, CUDA {facts.get('cuda')}, cuDNN {facts.get('cudnn')}.",
        "",
    ]
    if is_simulated(_lacks(results)):
        lines += ["**A simulated device: no time here says anything.**", ""]
    lines += [f"* It lacks *{name}*: {why}." for name, why in _lacks(results).items()]
    lines += ["", f"{counted(results)}:", "", "| part | verdict | | s |", "|---|---|---|---:|"]
    for name, part in parts.items():
        seconds = f"{part['seconds']:.0f}" if "seconds" in part else ""
        said = part["said"].replace("|", "/").replace("\n", " ")
        verdict = part["verdict"] if part["verdict"] == "passed" else f"**{part['verdict']}**"
        lines.append(f"| {PARTS[name].title} | {verdict} | {said} | {seconds} |")
    return lines


def _losses(results: Results) -> list[str]:
    rows = results["parts"].get("losses", {}).get("figures", {}).get("rows", {})
    if not rows:
        return []
    lines = [
        "Losses beside the CPU's in fp32, greatest relative difference, of the first step and of later ones"
        f" (at most {_bounds(FIRST)}; then {_bounds(LATER)}):",
        "",
        f"| recipe | first loss on the CPU | {' | '.join(FIRST)} |",
        f"|---|---:|{'---:|' * len(FIRST)}",
    ]
    for name, row in rows.items():
        cells = [f"{row['first'][p]:.1e}, {row['later'][p]:.1e}" if p in row["first"] else "" for p in FIRST]
        first = f"{row['losses']['cpu'][0]:.4f}" if "cpu" in row["losses"] else "failed"
        mark = "**" if row["wrong"] else ""
        lines.append(f"| {mark}`{name}`{mark} | {first} | {' | '.join(cells)} |")
    return lines


def _bounds(limits: Mapping[str, float]) -> str:
    return ", ".join(f"{value:g} in {name}" for name, value in limits.items())


def _beside(results: Results) -> list[str]:
    cases = [
        case
        for case in results["parts"].get("beside", {}).get("figures", {}).values()
        if isinstance(case, dict) and "ratios" in case
    ]
    if not cases:
        return []
    lines = [
        "A step, in the eager hand-written loop's, round by round in turns:",
        "",
        "| | samples/s | median | quartiles | least, most |",
        "|---|---:|---:|---:|---:|",
    ]
    for case in cases:
        lines.append(f"| *{case['title']}, batch {case['batch']}* | | | | |")
        for loop, seconds in case["seconds"].items():
            speed = f"{case['batch'] / statistics.median(seconds):,.0f}"
            lines.append(f"| {plots.TITLES[loop]} | {speed} | {_spread(case['ratios'].get(loop))} |")
    return lines


def _spread(ratios: list[float] | None) -> str:
    if ratios is None:
        return "1 | | "
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"**{middle:.3f}** | {low:.3f}, {high:.3f} | {min(ratios):.3f}, {max(ratios):.3f}"


def _speeds(results: Results) -> list[str]:
    speeds = plots.speeds(results)
    if not speeds:
        return []
    lines = ["| training | samples/s | of the device's peak | memory, MiB |", "|---|---:|---:|---:|"]
    for name, speed in speeds.items():
        mfu = "" if speed["mfu"] is None else f"{speed['mfu']:.1%}"
        memory = "" if speed["peak_memory_mib"] is None else f"{speed['peak_memory_mib']:,.0f}"
        lines.append(f"| {PARTS[name].title} | {speed['samples_per_s']:,.0f} | {mfu} | {memory} |")
    return lines


def _modes(results: Results) -> list[str]:
    rows = results["parts"].get("modes", {}).get("figures", {}).get("recipes", {})
    if not rows:
        return []
    heading = [f"`compile={mode}`" for mode in MODES]
    lines = [
        "Milliseconds of a step, laps in turns; in parentheses how long of it the device waits for data,"
        " where that is over a tenth:",
        "",
        f"| recipe | {' | '.join(heading)} | memory, MiB |",
        f"|---|{'---:|' * len(MODES)}---:|",
    ]
    for name, row in rows.items():
        memory = ", ".join(f"{row[mode]['MiB']:,.0f}" for mode in MODES if "ms" in row.get(mode, {}))
        lines.append(f"| `{name}` | {' | '.join(_step(row.get(mode, {})) for mode in MODES)} | {memory} |")
    return lines


def _step(timing: Mapping[str, Any]) -> str:
    if "ms" not in timing:
        return "failed" if timing else ""
    waits = f" ({timing['data']:.1f})" if timing["data"] > 0.1 * timing["ms"] else ""
    return f"{timing['ms']:.2f}{waits}"
