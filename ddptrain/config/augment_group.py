"""The config group ``augment``: another node in the place of ``data.augment``."""

from collections.abc import Sequence
from typing import Any

from ddptrain.errors import UserError

Tree = dict[str, Any]
_IMAGES = "ddptrain.data.images.data.ImageData"


def place_augment(tree: Tree, words: Sequence[str]) -> Tree:
    """The tree with ``augment`` in the place of ``data.augment``, of which nothing is left: Hydra would merge
    a group in that place with what data and recipe say there. ``words``: of the command line.

    Where the command line chooses other data than `ImageData` and no augment, that of the recipe is left out,
    and so is what it sets of ``data.augment`` for data without one. Raises UserError where the data are not
    `ImageData`, or a word sets what is replaced.
    """
    node, data = tree.get("augment"), tree.get("data")
    of_images = isinstance(data, dict) and data.get("_target_") == _IMAGES
    chosen = {word.lstrip("+").partition("=")[0] for word in words}
    asked = any(word.startswith(("augment", "data.augment")) for word in chosen)
    if isinstance(data, dict) and not of_images and "data" in chosen and not asked:
        return {**tree, "augment": {}, "data": _without_settings(data)}
    if not node:
        return tree
    if not isinstance(data, dict) or not of_images:
        raise UserError(
            f"augment: is for image classification ({_IMAGES}), and this recipe's data is"
            f" {data.get('_target_') if isinstance(data, dict) else data}. Leave augment=... out."
        )
    if "_target_" not in node:
        raise UserError(
            "augment: has keys and no augment._target_; choose what they are for: augment=<name>."
        )
    for word in words:
        if word.lstrip("+~").startswith("data.augment"):
            raise UserError(
                f"{word}: augment=... takes the place of data.augment; write {word.replace('data.', '', 1)}."
            )
    return {**tree, "augment": {}, "data": {**data, "augment": node}}


def _without_settings(data: Tree) -> Tree:
    """Without what is set of an augment that these data do not have."""
    node = data.get("augment")
    settings_alone = isinstance(node, dict) and "_target_" not in node
    return {name: value for name, value in data.items() if name != "augment" or not settings_alone}
