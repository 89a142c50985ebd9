"""What is printed when help is asked for; apart from the verbs, whose import takes seconds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddptrain.config.arguments import GROUPS
from ddptrain.config.choices import choices, first_comment
from ddptrain.text import as_yaml, in_columns
from ddptrain.verbs.installed import verb_named, verb_names

OPTIONS = {
    "--config-dir, -cd <folder>": "find recipes and other choices there too, and the code that they name",
    "--env <NAME>": "let YAMLs read this environment variable: ${oc.env:NAME}",
    "--script <file>.py": "train what this program gives to ddptrain.fit",
    "--trust <package>,...": "let YAMLs name what is defined in these installed packages",
    "--multirun, -m": "a sweep: a job for each combination of values: optim.lr=0.1,0.2",
    "--cfg, -c job|hydra|all": "print the config and train nothing",
    "--package, -p <section>": "with --cfg: this part alone",
    "--resolve": "with --cfg hydra: with what each ${...} stands for",
    "--explain <key>": "which files and words have set a key",
    "--info, -i [<what>]": "how the config is composed: all|config|defaults|defaults-tree|plugins|searchpath",
    "--run, -r": "one run: the default",
    "--help, -h": "this; after a verb its words; after recipe=<name> all its keys and values",
    "--hydra-help": "of Hydra, which composes the config",
    "--version": "",
}
"""Of all verbs that train or know a run."""


def overview(folders: Sequence[Path]) -> str:
    """Every verb, option, recipe and choice. folders: of YAMLs."""
    recipes = [(f"  {name}", first_comment(path)) for name, path in choices("recipe", folders).items()]
    return "\n".join(
        [
            "ddptrain [<verb>] recipe=<name> [<group>=<choice> ...] [<key>=<value> ...] [options]",
            "python -m ddptrain and, for several ranks, torchrun -m ddptrain take the same words.",
            "",
            "Verbs (ddptrain <verb> --help):",
            *in_columns([(f"  {name}", verb_named(name).summary) for name in verb_names()]),
            "",
            "Options:",
            *in_columns([(f"  {name}", said) for name, said in OPTIONS.items()]),
            "  doctor has --json and --cluster, launch has torchrun's: --nproc-per-node=<n> and others.",
            "",
            "Recipes:",
            *in_columns(recipes),
            "",
            "Other groups and their choices:",
            *_groups(folders),
            "",
            "All keys, their values and defaults: docs/config.md, or ddptrain recipe=<name> --help.",
        ]
    )


def of_recipe(tree: Mapping[str, Any], folders: Sequence[Path]) -> str:
    """All keys of a composed config, and what else there is to choose."""
    return "\n".join(
        [
            "Verbs, options and what each recipe is: ddptrain --help",
            "",
            "Choices (group=choice):",
            *_groups(folders),
            "",
            "Keys and their values with these choices (change one with key=value):",
            "",
            as_yaml(tree),
        ]
    )


def _groups(folders: Sequence[Path]) -> list[str]:
    rows = [(f"  {group}=", ", ".join(choices(group, folders))) for group in GROUPS if group != "recipe"]
    return in_columns([row for row in rows if row[1]])
