"""The hour's pictures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bars import draw as draw_ratios
from gpu_parts.losses import FIRST, LATER
from gpu_parts.machine import is_simulated

TITLES = {
    "hand": "hand-written loop",
    "ddptrain": "ddptrain",
    "hand-compiled": "hand-written loop, compiled",
    "ddptrain-compiled": "ddptrain, compiled",
}
COLOURS = ("#0f766e", "#c2410c", "#1d4ed8")
PHASES = {
    "data": "#1d4ed8",
    "copy": "#60a5fa",
    "forward": "#0f766e",
    "backward": "#5eead4",
    "all_reduce": "#7e22ce",
    "optimizer": "#c2410c",
    "replay": "#f59e0b",
    "logging": "#a8a29e",
    "evaluating": "#d6d3d1",
    "drawing": "#e7e5e4",
    "saving": "#78716c",
}


def draw(results: Mapping[str, Any], out: Path) -> list[Path]:
    """Those for which there are figures."""
    parts = results["parts"]
    facts = parts["machine"]["figures"].get("facts", {"gpus": ["no GPU"], "versions": {"torch": "?"}})
    simulated = "a simulated " if is_simulated(parts["machine"]["figures"].get("lacks", {})) else ""
    where = f"{simulated}{facts['gpus'][0]}, torch {facts['versions']['torch']}"
    files = []
    if rows := parts.get("losses", {}).get("figures", {}).get("rows"):
        files.append(_losses(rows, where, out / "losses.png"))
    cases = {
        f"{case['title']}, batch {case['batch']}": {
            TITLES[loop]: ratios for loop, ratios in case["ratios"].items()
        }
        for case in parts.get("beside", {}).get("figures", {}).values()
        if isinstance(case, dict) and all(len(ratios) > 1 for ratios in case.get("ratios", {"": []}).values())
    }
    if cases:
        draw_ratios(cases, f"median and quartiles; {where}", out / "ratios.png")
        files.append(out / "ratios.png")
    if measured := speeds(results):
        files.append(_phases(measured, where, out / "time.png"))
    return files


def speeds(results: Mapping[str, Any]) -> dict[str, Any]:
    """What each training said of its time."""
    figures = {name: part["figures"] for name, part in results["parts"].items()}
    return {name: measured["speed"] for name, measured in figures.items() if "speed" in measured}


def _losses(rows: Mapping[str, Any], where: str, file: Path) -> Path:
    """The greatest differences from the CPU's losses, first step and later ones, beside what is allowed."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, sides = pyplot.subplots(
        1, 2, figsize=(10, 1.5 + 0.42 * len(rows)), sharey=True, layout="constrained"
    )
    for axis, kind, allowed, title in (
        (sides[0], "first", FIRST, "first step"),
        (sides[1], "later", LATER, "steps after it"),
    ):
        for place, (precision, colour) in enumerate(zip(FIRST, COLOURS, strict=True)):
            heights = [row + 0.27 * (place - 1) for row in range(len(rows))]
            # an exact agreement has no place on a logarithmic axis
            values = [max(row[kind].get(precision, 0), 1e-8) for row in rows.values()]
            axis.barh(heights, values, height=0.25, color=colour, label=precision)
            axis.axvline(allowed[precision], color=colour, linewidth=1, linestyle=":")
        axis.set_xscale("log")
        axis.set_xlim(1e-8, 1)
        axis.set_title(title, fontsize=10, loc="left")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    sides[0].set_yticks(range(len(rows)), list(rows))
    sides[0].invert_yaxis()
    handles = sides[0].get_legend_handles_labels()
    figure.legend(*handles, fontsize=8, loc="outside lower center", ncols=len(FIRST))
    figure.suptitle(
        f"relative difference from the CPU's losses in fp32 (dotted: allowed); {where}", fontsize=9
    )
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
    return file


def _phases(measured: Mapping[str, Any], where: str, file: Path) -> Path:
    """Where each training's time went, as shares."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axis = pyplot.subplots(figsize=(9, 1.6 + 0.4 * len(measured)), layout="constrained")
    for place, speed in enumerate(measured.values()):
        left = 0.0
        for phase, colour in PHASES.items():
            share = speed["time"].get(phase, 0.0)
            axis.barh(place, share, left=left, color=colour, height=0.7)
            left += share
    axis.set_yticks(range(len(measured)), list(measured), fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=colour) for colour in PHASES.values()]
    figure.legend(
        handles, [name.replace("_", "-") for name in PHASES], loc="outside lower center", ncols=5, fontsize=8
    )
    axis.set_title(f"where the time of each training went; {where}", fontsize=9, loc="left")
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
    return file
