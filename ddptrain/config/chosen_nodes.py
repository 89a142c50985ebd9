"""The groups ``optim``, ``sched`` and ``strategy``: a choice beside the recipe's has its own arguments."""

from collections.abc import Callable, Sequence

from ddptrain.config.augment_group import Tree

_OF_ANY_OPTIMIZER = ("groups", "layer_decay")


def place_nodes(tree: Tree, words: Sequence[str], composed: Callable[[Sequence[str]], Tree]) -> Tree:
    """The tree, and where the words of the command line choose another optimizer, schedule or strategy than
    the recipe's, with that one's own arguments. What the words set is kept; a rate for AdamW is none for SGD,
    but a share of the run is the same for each schedule that has it, and so for strategies.

    composed: the tree that some words alone make.
    """
    for section in ("optim", "sched", "strategy"):
        choice = [word for word in words if word.startswith(f"{section}=")]
        if not choice:
            continue
        own = composed(choice)[section]
        recipes = composed([word for word in words if word.startswith("recipe=")])[section]
        if own.get("_target_") == recipes.get("_target_"):
            continue
        typed = {word.lstrip("+").partition("=")[0].removeprefix(f"{section}.") for word in words}
        of_any = _OF_ANY_OPTIMIZER if section == "optim" else own.keys() - {"_target_"}
        kept = {name: value for name, value in tree[section].items() if name in {*of_any, *typed}}
        tree = {**tree, section: {**own, **kept}}
    return tree
