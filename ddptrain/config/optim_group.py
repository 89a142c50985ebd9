"""The config group ``optim``: another optimizer than the recipe's comes with its own numbers."""

from collections.abc import Callable, Sequence

from ddptrain.config.augment_group import Tree

_OF_ANY_OPTIMIZER = ("groups", "layer_decay")


def place_optim(tree: Tree, words: Sequence[str], composed: Callable[[Sequence[str]], Tree]) -> Tree:
    """The tree, and where the words of the command line choose another optimizer than the recipe's, with that
    one's own arguments, but for those that the words set: a rate for AdamW is none for SGD.

    composed: the tree that some words alone make.
    """
    choice = [word for word in words if word.startswith("optim=")]
    if not choice:
        return tree
    own = composed(choice)["optim"]
    recipes = composed([word for word in words if word.startswith("recipe=")])["optim"]
    if own.get("_target_") == recipes.get("_target_"):
        return tree
    typed = {word.lstrip("+").partition("=")[0].removeprefix("optim.") for word in words}
    kept = {name: value for name, value in tree["optim"].items() if name in (*_OF_ANY_OPTIMIZER, *typed)}
    return {**tree, "optim": {**own, **kept}}
