"""Where two places speak of the same thing: the two parts of a set, of their classes; a set and a trained
model, of the pictures' size."""

import logging
import unicodedata
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ddptrain.errors import UserError
from ddptrain.text import first_few

log = logging.getLogger("ddptrain")

Relabelling = Callable[[Tensor], Tensor]
"""Labels of a part for validation -> those that training has for the same classes."""


def note_checkpoints_own(key: str, configured: object, known: object) -> None:
    """Log that a model's own value, out of its checkpoint, is used in place of the config's."""
    values = ["null" if value is None else value for value in (configured, known)]
    log.info("note       %s=%s: not used; the checkpoint's model was trained with %s", key, *values)


def check_known(valid: Iterable[str], train: Iterable[str], where: str, trained: str) -> None:
    """Raises UserError naming a class of validation, in ``where``, that is none of those in ``trained``."""
    known = set(train)
    plain = {_plain(name): name for name in known}
    for name in sorted(set(valid) - known):
        alike = plain.get(_plain(name))
        rule = "Both need the same classes."
        if alike is not None:
            rule = f"{alike!r} is, which differs in {_difference(name, alike)} alone. Rename one of them."
        raise UserError(f"{where}: class {name!r} is not in {trained}. {rule}")


def check_distinct(names: Iterable[str], where: str) -> None:
    """Raises UserError for two classes that are the same word to people: é in one character, and in two."""
    first_with: dict[str, str] = {}
    for name in names:
        other = first_with.setdefault(unicodedata.normalize("NFC", name), name)
        if other != name:
            raise UserError(
                f"{where}: two classes are called {name!r}, which differ in how Unicode writes them alone"
                f" ({other!a}, {name!a}). Rename one of them."
            )


def check_renamed(configured: Sequence[str], own: Sequence[str], key: str) -> None:
    """Raises UserError for configured names, in place of a set's own, that stand for other classes there."""
    for place, (name, known) in enumerate(zip(configured, own, strict=False)):
        if name != known and name in own:
            raise UserError(
                f"{key}: class {place} is {name!r}, and {known!r} in the set, where {name!r} is class"
                f" {list(own).index(name)}. Leave {key} out, or name the classes in the set's order."
            )


def _plain(name: str) -> str:
    """What two spellings of a name have in common."""
    return "".join(unicodedata.normalize("NFC", name).split()).casefold()


def _difference(name: str, other: str) -> str:
    same = unicodedata.normalize("NFC", name) == unicodedata.normalize("NFC", other)
    return f"how Unicode writes it ({name!a}, {other!a})" if same else "capitals or spaces"


def places_among(train: Sequence[str], valid: Sequence[str], where: str, trained: str) -> list[int]:
    """Where each class of validation, in the order of its own labels, stands among those of training.

    Raises UserError as `check_known`, and where a name stands for two classes.
    """
    if list(valid) == list(train[: len(valid)]):
        return list(range(len(valid)))
    check_known(valid, train, where, trained)
    places = {name: place for place, name in enumerate(train)}
    for names, of in ((train, trained), (valid, where)):
        if len(set(names)) < len(names):
            twice = next(name for name in names if list(names).count(name) > 1)
            raise UserError(
                f"{of}: two classes are called {twice!r}, so the classes of {where}, which are in another"
                " order, can't be found by their names. Give both the same classes in the same order."
            )
    return [places[name] for name in valid]


def count_alike(places: Sequence[int]) -> bool:
    """Whether labels mean the same in both parts as they are."""
    return list(places) == list(range(len(places)))


def check_alike(train: Sequence[str], valid: Sequence[str], where: str, trained: str) -> None:
    """As `places_among`, for labels that can't be renumbered: classes in another order are refused, too."""
    if not count_alike(places_among(train, valid, where, trained)):
        raise UserError(
            f"{where}: its classes are {first_few(list(valid), 5)}, and those of {trained}"
            f" {first_few(list(train), 5)}: a label stands for another class there. Give both the same"
            " classes in the same order."
        )


def note_other_labels(places: Sequence[int], where: str, trained: str) -> None:
    """Log that labels are taken by their names, where they are other numbers."""
    if not count_alike(places):
        log.info(
            "note       %s: numbers its classes differently from %s; labels are matched by class name (its"
            " class 0 is class %d there)",
            *(where, trained, places[0]),
        )


def relabelled(labels: Tensor, places: Sequence[int], classes: int, where: str) -> Tensor:
    """Validation's labels as training counts them.

    labels: int64 (n,), or (n, len(places)), 1 for each class that a sample has; then the result has
    ``classes`` columns. Raises UserError for labels beyond the classes that ``where`` names.
    """
    if labels.ndim == 2:
        if labels.shape[1] != len(places):
            raise UserError(f"{where}: names {len(places)} classes, and its labels have {labels.shape[1]}.")
        renumbered = labels.new_zeros(len(labels), classes)
        renumbered[:, list(places)] = labels
        return renumbered
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(places):
        raise UserError(
            f"{where}: names {len(places)} classes, so its labels must be 0 to {len(places) - 1}; they are"
            f" {int(labels.min())} to {int(labels.max())}."
        )
    return labels if count_alike(places) else torch.tensor(places)[labels]
