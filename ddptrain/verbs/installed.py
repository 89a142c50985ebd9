"""The verbs that there are: entry points of the group ``ddptrain.verbs``, ours and other packages'."""

from collections.abc import Mapping
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


def verb_names() -> tuple[str, ...]:
    names = set(_entries())
    return (*(name for name in _ORDER if name in names), *sorted(names - {*_ORDER}))


def verb_named(name: str) -> Verb:
    """Imports its module. Of another package's that can't be imported, or is none, a verb that says so: help
    and the other verbs go on."""
    entry = _entries()[name]
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


@cache
def _entries() -> Mapping[str, metadata.EntryPoint]:
    """By their names; of two packages' of one name the first that Python finds. Raises UserError where
    ddptrain itself is not installed."""
    entries = {entry.name: entry for entry in reversed([*metadata.entry_points(group=ENTRY_POINTS)])}
    if "train" not in entries:
        raise UserError("ddptrain is not installed here: run pip install -e . in its checkout.")
    return entries


def _broken(message: str) -> Verb:
    def run(arguments: Arguments) -> int:
        raise UserError(message)

    return Verb(run=run, summary=message.partition(": ")[2])
