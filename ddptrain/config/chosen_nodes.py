"""The groups ``optim``, ``sched`` and ``strategy``: a choice beside the recipe's has its own arguments."""

from collections.abc import Callable, Sequence
from functools import cache

from omegaconf import DictConfig

from ddptrain.config.augment_group import Tree
from ddptrain.config.explain import plain_tree
from ddptrain.keys import key_of

_SECTIONS = ("optim", "sched", "strategy")
_OF_ANY_OPTIMIZER = ("groups", "layer_decay")


def chosen_nodes(
    composed: DictConfig, words: Sequence[str], compose: Callable[[Sequence[str]], Tree]
) -> Tree:
    """The sections for which the words of the command line choose another optimizer, schedule or strategy
    than the recipe's: with that one's own arguments. What the words set is kept; a rate for AdamW is none for
    SGD, but a share of the run is the same for each schedule that has it, and so for strategies.

    They hold their interpolations. compose: the tree of some words alone; it takes a tenth of a second.
    """
    choices = {word.partition("=")[0]: word for word in words if word.partition("=")[0] in _SECTIONS}
    if not choices:
        return {}
    tree, chosen, nodes = plain_tree(composed, resolve=False), compose(list(choices.values())), {}
    recipes = cache(lambda: compose([word for word in words if word.startswith("recipe=")]))
    for section in choices:
        own = _without(chosen[section], [word for word in words if word.startswith(f"~{section}.")])
        if section != "optim" and tree[section].keys() <= own.keys():
            continue  # nothing of another one is there
        if own.get("_target_") == recipes()[section].get("_target_"):
            continue
        typed = {key_of(word).removeprefix(f"{section}.").partition(".")[0] for word in words}
        of_any = _OF_ANY_OPTIMIZER if section == "optim" else own.keys() - {"_target_"}
        kept = {name: value for name, value in tree[section].items() if name in {*of_any, *typed}}
        nodes[section] = {**own, **kept}
    return nodes


def _without(node: Tree, words: Sequence[str]) -> Tree:
    """Without what ``~section.name`` has taken out of it."""
    removed = {word.rpartition(".")[2] for word in words}
    return {name: value for name, value in node.items() if name not in removed}
