"""A run's curves as a table. Imports no torch."""

from typing import Any, final

from ddptrain.errors import UserError
from ddptrain.observe.metrics_file import POSITION
from ddptrain.text import first_few, in_columns

_MOST_SHOWN = 20


@final
class MetricRows(list[dict[str, Any]]):
    """The rows of a run's metrics.jsonl: ``step``, ``epoch``, ``samples``, ``split`` (train or valid) and the
    values logged there; None for one that was not finite. ``pandas.DataFrame(curves)`` takes it as it is."""

    def points(self, name: str, split: str = "valid") -> tuple[list[int], list[float]]:
        """(steps, values) of one curve, for ``pyplot.plot(*run.curves.points("accuracy"))``; NaN for what was
        not finite. Raises UserError where the run has none of that name in that split."""
        rows = [row for row in self if row["split"] == split and name in row]
        if not rows:
            known = dict.fromkeys(key for row in self if row["split"] == split for key in row)
            names = first_few([key for key in known if key not in POSITION], 12) or "none"
            raise UserError(f"{name}: there is no such curve of split {split!r}; there are {names}.")
        values = [row[name] for row in rows]
        return [row["step"] for row in rows], [float("nan") if v is None else v for v in values]

    def __repr__(self) -> str:
        """The first and last rows, without the details, whose names have a slash."""
        names = list(dict.fromkeys(name for row in self for name in row if "/" not in name))
        if not names:
            return "no rows"
        half = _MOST_SHOWN // 2
        parts = [self[:half], self[-half:]] if len(self) > _MOST_SHOWN else [self]
        rows = [[[_brief(row.get(name, "")) for name in names] for row in part] for part in parts]
        gap = [["..."] * len(names)] if len(parts) > 1 else []
        return "\n".join(in_columns([names, *rows[0], *gap, *(rows[1] if gap else [])]))


def _brief(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
