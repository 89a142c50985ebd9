"""The throughput table as a picture: each peer's step in steps of the tuned hand-written loop."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles

_OURS, _OTHERS = "#c2410c", "#94a3b8"


def draw(cases: Mapping[str, Mapping[str, Sequence[float]]], note: str, file: Path) -> None:
    """cases: of each title, of each peer, its ratios round by round, the shortest step at the top."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = [len(peers) + 0.6 for peers in cases.values()]
    figure, axes = pyplot.subplots(
        len(cases), 1, figsize=(8, 1 + 0.32 * sum(rows)), sharex=True, layout="constrained", squeeze=False,
        height_ratios=rows,
    )  # fmt: skip
    for axis, (title, peers) in zip(axes[:, 0], cases.items(), strict=True):
        ordered = sorted(peers, key=lambda peer: -median(peers[peer]))
        middles = [median(peers[peer]) for peer in ordered]
        spans = [quantiles(peers[peer], n=4) for peer in ordered]
        # no error bar may be negative, and rounding makes one of equal numbers
        less = [max(0.0, m - s[0]) for m, s in zip(middles, spans, strict=True)]
        more = [max(0.0, s[2] - m) for m, s in zip(middles, spans, strict=True)]
        colours = [_OURS if peer.startswith("ddptrain") else _OTHERS for peer in ordered]
        axis.barh(ordered, middles, xerr=[less, more], color=colours, ecolor="#334155", capsize=2, height=0.7)
        axis.axvline(1, color="#334155", linewidth=1, linestyle=":")
        for place, middle in enumerate(middles):
            axis.text(0.02, place, f"{middle:.2f}", va="center", fontsize=8, color="white")
        axis.set_ylim(-0.8, len(ordered) - 0.2)
        axis.set_title(title, fontsize=10, loc="left")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel(
        f"a step, in steps of the tuned hand-written loop (shorter is better)\n{note}", fontsize=8
    )
    figure.savefig(file, dpi=200)
    pyplot.close(figure)
