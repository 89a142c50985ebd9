"""What a YAML may be and read, whoever wrote it: small, plain values, and little of the environment.

A config can come from a stranger: in a folder of recipes, or in a run's folder. Imports neither Hydra nor
torch.
"""

import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException
from omegaconf.grammar_visitor import GrammarVisitor

from ddptrain.config.arguments import GROUPS
from ddptrain.errors import UserError

LARGEST = 256 * 1024
"""Bytes of a file; the largest of ours has 2,000."""
DEEPEST = 32
MOST_VALUES = 10_000
"""Values of a file with its aliases written out, so that few lines can't fill the memory."""
MOST_INTERPOLATIONS = 200
"""``${...}`` that are looked up for one config, for they can double as aliases do."""
ENVIRONMENT = (
    *("HOME", "USER", "TMPDIR", "SCRATCH", "SLURM_TMPDIR"),
    *("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "TORCHELASTIC_RUN_ID"),
)
"""What ``${oc.env:}`` may read without --env: places and job numbers, nothing secret, nothing in which ranks
differ."""

_PLAIN_TAG = re.compile(r"!|tag:yaml\.org,2002:(str|int|float|bool|null|map|seq)")
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)*")
_NOT_SET = object()


def read_config(path: Path) -> DictConfig:
    """A YAML file as a config, with its interpolations unresolved.

    Raises UserError where it can't be read, holds no keys, or is larger or stranger than a config needs.
    """
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise UserError(f"{path}: is larger than {LARGEST:,} bytes, so it is no config.")
        text = content.decode()
        _check_size(text, path)
        config = OmegaConf.load(io.StringIO(text))
    except UserError:
        raise
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, OSError) as error:
        raise UserError(f"{path}: can't be read ({' '.join(str(error).split())}).") from error
    if not isinstance(config, DictConfig):
        raise UserError(f"{path}: is no run's or recipe's config: it holds a list.")
    return config


def named_defaults(config: DictConfig, path: Path) -> list[str]:
    """Every group, config and package that a YAML's ``defaults`` name.

    Raises UserError where they are no list of names, add a group that every run has, or lead out of the
    folders of YAMLs.
    """
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    names: list[str] = []
    problem = (
        f"{path}: defaults: must be a list of names, and of groups with a name each (- override /model: cnn)."
    )
    if not isinstance(items := plain.get("defaults", []), list):
        raise UserError(problem)
    for item in items:
        group, choice = next(iter(item.items())) if isinstance(item, dict) and len(item) == 1 else (item, [])
        choices = [group, *(choice if isinstance(choice, list) else [choice or ""])]
        if not all(isinstance(name, str) for name in choices):
            raise UserError(problem)
        section = re.sub(r"^(override |optional |/)*", "", group)
        if isinstance(item, dict) and section in GROUPS:
            right = choice if section == "recipe" else f"override /{section}: {choice}"
            if f"{group}: {choice}" != right:
                raise UserError(f"{path}: defaults: `- {group}: {choice}` must be `- {right}`.")
        names += choices
    for name in names:
        if re.search(r"\.\.|//|\\|~|\$\{", name):
            raise UserError(
                f"{path}: defaults: {name} leads out of the folders of YAMLs; name what is in them."
            )
    return names


def is_plain_name(name: Any) -> bool:
    """Whether the name of a recipe or a choice leads nowhere but down."""
    return isinstance(name, str) and bool(_NAME.fullmatch(name)) and ".." not in name.split("/")


def is_below(folder: str) -> bool:
    """Whether a path leads to somewhere below the current folder."""
    return not Path(folder).is_absolute() and ".." not in Path(folder).parts and not folder.startswith("~")


def guard_resolvers(variables: Sequence[str]) -> None:
    """Leave ``${...}`` no way to the rest of the environment, nor to text that is then evaluated.

    variables: those that the command line lets configs read, besides `ENVIRONMENT`.
    """
    readable = (*ENVIRONMENT, *variables)
    OmegaConf.register_new_resolver("oc.env", partial(_environment, readable), replace=True)
    for name in ("oc.create", "oc.decode"):
        OmegaConf.clear_resolver(name)


@contextmanager
def resolvers_restored() -> Iterator[None]:
    """In a process that is not ours, a notebook, OmegaConf is afterwards as it was."""
    before = dict(BaseContainer._resolvers)
    try:
        yield
    finally:
        BaseContainer._resolvers.clear()
        BaseContainer._resolvers.update(before)


@contextmanager
def few_interpolations() -> Iterator[None]:
    """Stop a config whose interpolations lead to others, and those to others, again and again."""
    left = MOST_INTERPOLATIONS
    visit = GrammarVisitor.visitInterpolation

    def counted(visitor: GrammarVisitor, interpolation: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise UserError(
                f"a config may look up {MOST_INTERPOLATIONS} values by ${{...}}; this one needs more. Write"
                " some of them out."
            )
        return visit(visitor, interpolation)

    GrammarVisitor.visitInterpolation = counted  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        GrammarVisitor.visitInterpolation = visit  # type: ignore[method-assign]


def _environment(readable: Sequence[str], name: str, default: Any = _NOT_SET) -> str | None:
    if name not in readable:
        raise UserError(
            f"${{oc.env:{name}}}: a config may not read this variable, for it would be kept in the run's"
            f" config.yaml. It may read {', '.join(readable)}; if it is no secret, name it on the command"
            f" line: --env {name}"
        )
    if name in os.environ:
        return os.environ[name]
    if default is _NOT_SET:
        raise UserError(f"${{oc.env:{name}}}: is not set. Set it, or write ${{oc.env:{name},<default>}}.")
    return None if default is None else str(default)


def _check_size(text: str, path: Path) -> None:
    """Count what the parser says before anything is built from it."""
    sizes = [0]
    anchors: list[str | None] = []
    known: dict[str, int] = {}
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = f"{path}, line {event.start_mark.line + 1}"
        tag = getattr(event, "tag", None)
        if tag is not None and not _PLAIN_TAG.fullmatch(tag):
            raise UserError(f"{line}: {tag} is no plain value; a config holds text, numbers, lists and keys.")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in known:
                raise UserError(f"{line}: *{event.anchor} has no whole value before it.")
            sizes[-1] += known[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            if len(sizes) == 1 and event.value.strip():
                raise UserError(f"{line}: is no config: it must hold keys and their values (key: value).")
            size = 1 + len(event.value) // 64
            sizes[-1] += size
            known[event.anchor or ""] = size
        elif isinstance(event, yaml.CollectionStartEvent):
            sizes.append(1)
            anchors.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            size = sizes.pop()
            known[anchors.pop() or ""] = size
            sizes[-1] += size
        if len(sizes) > DEEPEST:
            raise UserError(f"{line}: is more than {DEEPEST} levels deep, so it is no config.")
        if sizes[-1] > MOST_VALUES:
            raise UserError(f"{line}: there are more than {MOST_VALUES:,} values, so it is no config.")
