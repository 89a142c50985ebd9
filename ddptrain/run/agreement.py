"""A checkpoint and the data at hand: whether they speak of the same classes and of the same inputs."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ddptrain.api.recipe import Data
from ddptrain.config.schema import Config
from ddptrain.engine.saved_checkpoint import LoadedCheckpoint
from ddptrain.errors import UserError
from ddptrain.run.initial_weights import normalisation_of
from ddptrain.text import first_few

log = logging.getLogger("ddptrain")

_SHOWN = 3
_LONGEST = 60
_NAMES = "classes"
"""Of `Data.metadata`: compared as `Data.outputs`."""


@contextmanager
def of_same_kind(data: Data, saved: LoadedCheckpoint) -> Iterator[None]:
    """Inside, data that don't understand the checkpoint's `Data.metadata` are refused."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        known = ", ".join(saved.manifest["recall"])
        raise UserError(
            f"{saved.path}: was trained on another kind of data than {type(data).__name__}: what it knows of"
            f" it ({known}) is not of that kind ({error!r}). Use the kind that it was trained with."
        ) from error


def check_same_data(data: Data, saved: LoadedCheckpoint) -> None:
    """Refuse a checkpoint whose model's outputs stand for something else than this data's, or whose inputs
    were made in another way (size, normalisation, tokens)."""
    differ = _outputs_differ(saved.manifest.get("outputs") or [], list(data.outputs))
    if differ:
        raise UserError(
            f"{saved.path}: its model's outputs stand for other classes or characters than this data's:"
            f" {differ}. Use the data it was trained with."
        )
    differ = _inputs_differ(saved.manifest.get("recall") or {}, data.metadata())
    if differ:
        raise UserError(
            f"{saved.path}: its model was trained on inputs that were made in another way than"
            f" {type(data).__name__} makes them: {differ}. Use data that makes them as in training, or start"
            " a new run."
        )


def normalise_as_weights(config: Config, data: Data, saved: LoadedCheckpoint | None) -> None:
    """Before `Data.prepare`: pictures are normalised as those that a library's weights (``init.weights``)
    were trained on; in a run that goes on, as it began."""
    if saved is not None:
        known = saved.manifest.get("recall") or {}
        if "std" in known:
            data.normalise_as(known["mean"], known["std"])
        return
    normal = normalisation_of(config.init.weights or "", config.model or {})
    if normal is not None and not data.normalise_as(*normal):
        mean, std = (", ".join(f"{value:.4g}" for value in of) for of in normal)
        log.info(
            "note       init.weights=%s: trained on pictures normalised by mean %s and deviation %s, of 0 to"
            " 255; how %s does it is its own",
            *(config.init.weights, mean, std, type(data).__name__),
        )


def check_metadata(data: Data) -> None:
    """Refuse `Data.metadata` that a checkpoint would give back as something else, or could not hold."""
    if wrong := _not_as_stored(data.metadata(), "metadata()"):
        raise UserError(
            f"data: {type(data).__name__}.{wrong}. Checkpoints hold it as JSON: dicts whose keys are text,"
            " lists, texts, numbers, true, false and none. Return it as these, say keys as str(key), and turn"
            " them back in load_metadata."
        )


def _not_as_stored(value: Any, where: str) -> str:
    """The first place that JSON would change, in words; '' where there is none."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                return f"{where} has the key {key!r} ({type(key).__name__})"
            if wrong := _not_as_stored(inner, f"{where}[{key!r}]"):
                return wrong
        return ""
    if isinstance(value, list | tuple):
        problems = (_not_as_stored(inner, f"{where}[{i}]") for i, inner in enumerate(value))
        return next(filter(None, problems), "")
    plain = isinstance(value, str | int | float | None)
    return "" if plain else f"{where} is of the kind {type(value).__name__}"


def note_other_samples(data: Data, saved: LoadedCheckpoint) -> None:
    """Log where a checkpoint was trained and evaluated with other samples than this data's."""
    there = saved.manifest
    here = {"data": data.identity, "train_size": data.train_size, "valid_size": data.valid_size}
    if any(there[name] != value for name, value in here.items()):
        sizes = [f"{of['train_size']:,} + {of['valid_size']:,}" for of in (there, here)]
        log.warning(
            "note       data: other samples than %s was trained with and evaluated on (%s there and %s here,"
            " or other files). If the set has changed since, or a part of it is held out, samples that the"
            " model was trained on may be among those that it is now judged by", saved.path, *sizes,
        )  # fmt: skip


def note_other_data(weights: str, manifest: Mapping[str, Any], data: Data) -> None:
    """Log where weights of a checkpoint (``init.weights``) were trained for other outputs or inputs."""
    theirs, own = manifest.get("outputs") or [], data.outputs
    differ = _outputs_differ(theirs, list(own))
    if differ:
        last = "starts at random: it has another size there"
        if len(theirs) == len(own):
            last = "starts from what it was there; init.skip=[pattern] makes it random"
        log.warning(
            "note       init.weights=%s: its outputs stand for other classes or characters: %s. The last"
            " layer %s",
            *(weights, differ, last),
        )
    differ = _inputs_differ(manifest.get("recall") or {}, data.metadata())
    if differ:
        log.info("note       init.weights=%s: was trained on other inputs: %s", weights, differ)


def _outputs_differ(theirs: Sequence[str], own: Sequence[str]) -> str:
    """How; '' where they don't."""
    if list(theirs) == list(own):
        return ""
    gone, new = (
        first_few([repr(name) for name in a if name not in b], 5) for a, b in ((theirs, own), (own, theirs))
    )
    if gone or new:
        return f"{gone or 'none'} only there, {new or 'none'} only here"
    if len(theirs) != len(own):
        return f"{len(theirs)} there and {len(own)} here, some of one name"
    places = [i for i, (a, b) in enumerate(zip(theirs, own, strict=True)) if a != b]
    differing = [f"output {i} is {theirs[i]!r} there and {own[i]!r} here" for i in places[:_SHOWN]]
    return f"the same {len(own)} in another order, {len(places)} of them elsewhere: {', '.join(differing)}"


def _inputs_differ(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """How; '' where they don't."""
    here = json.loads(json.dumps(dict(own)))  # as it was stored: tuples are lists
    names = [name for name in {**theirs, **here} if name != _NAMES and theirs.get(name) != here.get(name)]
    return ", ".join(
        f"{name} {_shown(theirs.get(name))} there and {_shown(here.get(name))} here" for name in names
    )


def _shown(value: Any) -> str:
    """In a few words."""
    text = "not known" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
