"""The config group ``optim``: another optimizer than the recipe's comes with its own numbers."""

from collections.abc import Sequence

from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from ddptrain.cli.augment_group import Tree
from ddptrain.cli.explain import plain_tree

_OF_ANY_OPTIMIZER = ("groups", "layer_decay")


def place_optim(tree: Tree, words: Sequence[str]) -> Tree:
    """The tree, and where the words of the command line choose another optimizer than the recipe's, with that
    one's own arguments, but for those that the words set: a rate for AdamW is none for SGD."""
    if not any(word.startswith("optim=") for word in words):
        return tree
    chosen, own = tree["optim"], _node([word for word in words if word.startswith("optim=")])
    recipes = _node([word for word in words if word.startswith("recipe=")])
    if own.get("_target_") == recipes.get("_target_"):
        return tree
    typed = {word.lstrip("+").partition("=")[0].removeprefix("optim.") for word in words}
    kept = {name: value for name, value in chosen.items() if name in (*_OF_ANY_OPTIMIZER, *typed)}
    return {**tree, "optim": {**own, **kept}}


def _node(words: Sequence[str]) -> Tree:
    """The optim node that these words alone make, while Hydra runs."""
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    composed = hydra.compose_config("config", list(words), RunMode.RUN, with_log_configuration=False)
    node: Tree = plain_tree(composed, resolve=False)["optim"]
    return node
