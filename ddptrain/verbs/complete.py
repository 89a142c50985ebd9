"""What may follow on a command line: for bash and zsh, which ask at each Tab and wait for the answer.

So nothing here imports torch, Hydra or OmegaConf: YAMLs are read as they are, and keys that only composing
would find are not offered.
"""

import dataclasses
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddptrain.config.arguments import CONFIG_DIR, ENV, EXPLAIN, GROUPS, OURS
from ddptrain.config.choices import choices, yaml_folders
from ddptrain.config.schema import Config, Rule
from ddptrain.text import parse_yaml
from ddptrain.verbs.argv import INFO_OF
from ddptrain.verbs.help import OPTIONS
from ddptrain.verbs.installed import verb_named, verb_names

SCRIPTS = {
    # the blank behind what is finished comes with the answer: bash 3.2 has no way to ask for none
    "bash": """\
_ddptrain() {
    local word
    COMPREPLY=()
    while IFS= read -r word; do
        COMPREPLY+=("$word")
    done < <("${1/#\\~/$HOME}" completion words "${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" 2>/dev/null)
}
complete -o nospace -o default -F _ddptrain ddptrain""",
    "zsh": """\
_ddptrain() {
    local -a found
    found=(${(f)"$(${~words[1]} completion words "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)"})
    if (( $#found )); then
        compadd -Q -S '' -- $found
    else
        compset -P '*='
        _files
    fi
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }
compdef _ddptrain ddptrain""",
}
_OTHER_VALUES = {
    "device": ("auto", "cpu", "cuda", "mps"),
    "run.resume": ("auto", "never"),
    "--cfg": ("job", "hydra", "all"),
    "--info": INFO_OF,
}
Tree = Mapping[str, Any]


def complete(line: str, breaks: str = "") -> int:
    """Print what may stand at the end of a line, one a line: finished words with a blank behind them.

    breaks: at these characters the shell divides words (bash's COMP_WORDBREAKS), and replaces only what
    follows the last of them.
    """
    *words, typed = _divided(line)
    kept = max((typed.rfind(character) for character in "=:" if character in breaks), default=-1) + 1
    for word in dict.fromkeys(_candidates(words[1:], typed)):
        if word.startswith(typed):
            finished = word.endswith(" ")
            print(re.sub(r"([^\w./=:,@%+-])", r"\\\1", word[kept:].rstrip(" ")) + " " * finished)
    return 0


def _divided(line: str) -> list[str]:
    """A shell's words; the last is the one at the cursor."""
    for quote in ("", "'", '"'):  # the last one may still be open
        try:
            words = shlex.split(line + quote)
        except ValueError:
            continue
        return words if line[-1:].strip() else [*words, ""]
    return [line]


def _candidates(words: Sequence[str], typed: str) -> Iterator[str]:
    line = _Line(words)
    key, equals, value = typed.partition("=")
    if words and words[-1] in (EXPLAIN, ENV, "--cfg", "--info"):
        yield from (_ended(known) for known in line.values(words[-1], typed))
    elif words and words[-1] in CONFIG_DIR:
        return  # files, by the shell itself
    elif equals:
        head, last = re.fullmatch(r"(.*[,\[])?(.*)", value).groups(default="")  # type: ignore[union-attr]
        for known in line.values(key, last):
            yield f"{key}={head}{known}" if head else _ended(f"{key}={known}")
    elif typed.startswith("-"):
        yield from line.options()
    else:
        if not words:
            yield from (f"{verb} " for verb in verb_names())
        yield from line.words(typed)


def _ended(word: str) -> str:
    """With a blank, unless it goes on."""
    return word if word.endswith(("/", ".")) else f"{word} "


class _Line:
    """The words before the cursor: the verb, and what they choose."""

    def __init__(self, words: Sequence[str]) -> None:
        self._before = words
        self._name = words[0] if words and words[0] in verb_names() else "train"
        self._verb = verb_named(self._name)
        self._given = dict(word.split("=", 1) for word in words if re.match(r"[^-][^=]*=", word))
        self._folders = yaml_folders([Path(name).expanduser() for name in _named_folders(words)])

    def options(self) -> Iterator[str]:
        for said in OPTIONS:  # --cfg, -c job|hydra|all
            name = said.partition(",")[0].partition(" ")[0]
            if self._verb.composes or (self._verb.of_a_run and name in OURS):
                yield f"{name}{'=' if re.search(' [<a-z]', said) else ' '}"
        for name, takes_a_value in self._verb.options(()).items():
            if "_" not in name:  # torchrun takes both spellings
                yield f"{name}{'=' if takes_a_value else ' '}"
        yield "--help "

    def words(self, typed: str) -> Iterator[str]:
        """Keys and words of the verb, and what it does. Sections one by one: ``train.``, then its keys."""
        actions = re.search(rf"ddptrain {self._name} ([a-z]+(?:\|[a-z]+)*) ", self._verb.help)
        if actions and len(self._before) == 1:
            yield from (f"{action} " for action in actions[1].split("|"))
        if self._name == "completion":
            yield from (f"{shell} " for shell in SCRIPTS)
        if self._name == "report":
            yield from _folders(typed)
        yield from (f"{name}=" for name in self._own())
        if self._verb.composes or self._verb.of_a_run:
            yield from self._keys(typed.rpartition(".")[0])

    def values(self, key: str, typed: str) -> Sequence[str]:
        own, section = self._own(), _section(key.rpartition(".")[0])
        field = section.get(key.rpartition(".")[2])
        if key in GROUPS:
            return list(choices(key, self._folders))
        if key == "run" and key in own:
            return [name.rstrip(" ") for name in _folders(typed)]
        if key == "checkpoint" and key in own:
            steps = Path(self._given.get("run", ""), "checkpoints").glob("step-*")
            return ["best", "last", *sorted(path.name for path in steps)]
        if key == ENV:
            return sorted(os.environ)
        if key == EXPLAIN:
            return [name.rstrip("=") for name in self._keys(typed.rpartition(".")[0])]
        if field is not None and (rule := field.metadata.get("rule", Rule())) != Rule():
            return rule.choices or rule.words  # type: ignore[no-any-return]
        known = [_at(tree, key) for tree in self._trees()]
        if (field is not None and field.type is bool) or any(isinstance(value, bool) for value in known):
            return ["true", "false"]
        return _OTHER_VALUES.get(key) or own.get(key) or []

    def _own(self) -> dict[str, list[str]]:
        """The words that the verb's help names, and their values if it lists them."""
        pairs = re.findall(r"(?<![\w.-])([a-z_]+)=([\w|]*)", self._verb.help)
        own: dict[str, list[str]] = {}
        for name, values in pairs:
            own[name] = own.get(name) or (values.strip("|").split("|") if "|" in values else [])
        return own

    def _keys(self, section: str) -> Iterator[str]:
        """One step further than ``section``: ``train.batch_size=``, ``data.source.``."""
        prefix = f"{section}." if section else ""
        sections = {name: dataclasses.is_dataclass(field.type) for name, field in _section(section).items()}
        for tree in self._trees():
            inner = _at(tree, section) if section else tree
            for name, value in inner.items() if isinstance(inner, Mapping) else ():
                sections[str(name)] = sections.get(str(name), False) or isinstance(value, Mapping)
        for name, is_section in sorted(sections.items()):
            if name not in ("recipe", "_target_", "defaults", "hydra"):
                yield f"{prefix}{name}{'.' if is_section else '='}"
        if not section:
            yield from (f"{group}=" for group in GROUPS if group != "recipe" or self._verb.composes)

    def _trees(self) -> list[Tree]:
        """The YAMLs that the line chooses: the recipe's and those of the groups; a run's saved one."""
        if self._verb.of_a_run:
            return [_read(Path(self._given.get("run", ""), "config.yaml"))]
        chosen: dict[str, Any] = {}
        recipe = self._given.get("recipe", "")
        trees = [_read(self._folders[0] / "config.yaml"), *self._recipe(recipe, chosen, [])]
        chosen |= _chosen(trees[0]) | chosen | {g: self._given[g] for g in GROUPS if g in self._given}
        for group, names in chosen.items():
            known = choices(group, self._folders)
            for name in re.findall(r"[\w-]+", str(names)):
                if name in known:
                    tree = _read(known[name])
                    trees.append(tree if group in tree else {group: tree})
        return trees

    def _recipe(self, name: str, chosen: dict[str, Any], seen: list[str]) -> list[Tree]:
        """A recipe's YAML and those that it begins with; notes what they choose."""
        known = choices("recipe", self._folders)
        if name not in known or name in seen:
            return []
        tree = _read(known[name])
        begun = [item for item in tree.get("defaults") or () if isinstance(item, str) and item != "_self_"]
        trees = [tree for base in begun for tree in self._recipe(base, chosen, [*seen, name])]
        chosen |= _chosen(tree)
        return [*trees, tree]


def _chosen(tree: Tree) -> dict[str, Any]:
    """The groups' choices of a YAML's defaults."""
    items = [item for item in tree.get("defaults") or () if isinstance(item, dict)]
    named = {str(name).split("/")[-1]: choice for item in items for name, choice in item.items()}
    return {group: named[group] for group in GROUPS if named.get(group)}


def _read(path: Path) -> Tree:
    """Empty where it is not there or can't be read: training says why."""
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _at(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _section(name: str) -> dict[str, dataclasses.Field[Any]]:
    """The schema's fields in a section; of the whole config where it is ''."""
    owner: Any = Config
    for part in name.split(".") if name else ():
        owner = {field.name: field.type for field in dataclasses.fields(owner)}.get(part)
        if not dataclasses.is_dataclass(owner):
            return {}
    return {field.name: field for field in dataclasses.fields(owner)}


def _named_folders(words: Sequence[str]) -> Iterator[str]:
    """Of --config-dir and of hydra.searchpath."""
    for before, word in zip(["", *words], words, strict=False):
        name, _, value = word.partition("=")
        if before in CONFIG_DIR:
            yield word
        elif name in CONFIG_DIR and value:
            yield value
        elif name == "hydra.searchpath":
            yield from re.findall(r"[^\[\],'\"]+", value)


def _folders(typed: str) -> Iterator[str]:
    """Runs and sweeps, and the folders that may lead to one."""
    if not typed:
        found = [path for top in ("runs", "sweeps") for deep in ("*", "*/*") for path in Path(top).glob(deep)]
        if runs := [f"{path} " for path in sorted(found) if (path / "config.yaml").is_file()]:
            yield from runs
            return
    start = typed.rpartition("/")[0] + "/" if "/" in typed else ""
    for path in sorted(Path(start or ".").iterdir()) if Path(start or ".").is_dir() else ():
        is_result = (path / "config.yaml").is_file() or (path / "ledger.jsonl").is_file()
        if path.is_dir() and not path.name.startswith("."):
            yield f"{start}{path.name}{' ' if is_result else '/'}"
