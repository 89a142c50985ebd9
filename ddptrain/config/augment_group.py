"""The config group ``augment``: another node in the place of ``data.augment``."""

from collections.abc import Sequence
from typing import Any

from ddptrain.errors import UserError

Tree = dict[str, Any]
_IMAGES = "ddptrain.data.images.data.ImageData"


def place_augment(tree: Tree, words: Sequence[str]) -> Tree:
    """The tree with ``augment`` in the place of ``data.augment``, of which nothing is left: Hydra would merge
    a group in that place with what data and recipe say there. ``words``: of the command line.

    Where the command line chooses other data than `ImageData` and no augment, that of the recipe is left out.
    Raises UserError where the data are not `ImageData`, or a word sets what is replaced.
    """
    node, data = tree.get("augment"), tree.get("data")
    if not node:
        return tree
    of_images = isinstance(data, dict) and data.get("_target_") == _IMAGES
    chosen = {word.lstrip("+").partition("=")[0] for word in words}
    if not of_images and "data" in chosen and not any(word.startswith("augment") for word in chosen):
        return {**tree, "augment": {}}
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
