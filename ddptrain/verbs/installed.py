"""The verbs that there are: entry points of the group ``ddptrain.verbs``, ours and other packages'."""

from functools import cache
from importlib import metadata

from ddptrain.config.arguments import Arguments
from ddptrain.errors import UserError
from ddptrain.verbs.verb import Verb

ENTRY_POINTS = "ddptrain.verbs"
_ORDER = (
    *("train", "launch", "evaluate", "predict", "export", "checkpoint", "report", "serve"),
    *("bench", "prove", "find", "doctor", "write", "completion"),
)
"""In which ours are listed; others follow by name."""


@cache
def verb_names() -> tuple[str, ...]:
    """Raises UserError where ddptrain itself is not installed."""
    names = {entry.name for entry in metadata.entry_points(group=ENTRY_POINTS)}
    if "train" not in names:
        raise UserError("ddptrain is not installed here: run pip install -e . in its checkout.")
    return (*(name for name in _ORDER if name in names), *sorted(names - {*_ORDER}))


def verb_named(name: str) -> Verb:
    """Imports its module. Of another package's that can't be imported, or is none, a verb that says so: help
    and the other verbs go on."""
    (entry, *_) = metadata.entry_points(group=ENTRY_POINTS, name=name)
    try:
        verb = entry.load()
    except Exception as error:  # of any kind: another package's code
        if entry.value.startswith("ddptrain."):
            raise
        why = f"{type(error).__name__}: {error}"
        return _broken(f"{name}: {entry.value} can't be imported ({why}). Mend or uninstall its package.")
    if not isinstance(verb, Verb):
        return _broken(f"{name}: the entry point {entry.value} must name a ddptrain.verbs.verb.Verb.")
    return verb


def _broken(message: str) -> Verb:
    def run(arguments: Arguments) -> int:
        raise UserError(message)

    return Verb(run=run, summary=message.partition(": ")[2])
