"""From a composed config to a checked `Config`: every key known, every value in its range.

Hydra checks the types of what is declared, but lets ``+train.typo=1`` add a key to a declared
section; merging into the schema once more closes that hole. Keys inside ``_target_`` nodes are
checked against the target's signature by `ddptrain.config.instantiate.check_node`.
"""

import dataclasses
import math
import operator
import pickle
import re
from functools import cache
from typing import Any, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from ddptrain.config.choices import known_keys
from ddptrain.config.removed import what_to_use
from ddptrain.config.schema import MISSING, Config, Rule, Sweep
from ddptrain.errors import UserError
from ddptrain.keys import did_you_mean


def checked(tree: dict[str, Any]) -> Config:
    """The dataclasses for a plain, resolved config tree.

    Raises UserError naming every wrong key at once.
    """
    problems = _unknown_keys(tree, Config, "")
    if not problems:
        try:
            config = Config(**{name: _typed(name, tree) for name in _FIELDS})
        except OmegaConfBaseException as error:
            raise UserError(type_message(error)) from error
        problems = _broken_rules(config, "") + _cross_checks(config)
    if problems:
        raise UserError("\n".join(problems))
    return config


def _typed(name: str, tree: dict[str, Any]) -> Any:
    """What a key of the top level holds, with the schema's types. Known values are not typed again: the
    configs of a sweep differ in a few."""
    own = {name: tree[name]} if name in tree else {}
    known = (name, repr(own))
    is_node = isinstance(own.get(name), dict) and get_origin(_FIELDS[name].type) is dict
    if is_node and MISSING not in known[1]:
        return own[name]
    if known not in _TYPED:
        merged = OmegaConf.merge(_schema_of(name), own)
        _TYPED[known] = pickle.dumps(getattr(OmegaConf.to_object(merged), name))
    return pickle.loads(_TYPED[known])


_FIELDS = {field.name: field for field in dataclasses.fields(Config)}
_TYPED: dict[tuple[str, str], bytes] = {}


@cache
def _schema_of(name: str) -> Any:
    """The schema with this key alone."""
    own = _FIELDS[name]
    section = dataclasses.field(default=own.default, default_factory=own.default_factory)
    return OmegaConf.structured(dataclasses.make_dataclass("Config", [(name, own.type, section)]))


_WRONG_TYPE = re.compile(
    r"Value '(.*?)' (?:of type .*|is )(converted to Integer|converted to Float|not a valid bool)"
)
_MEANT = {
    "converted to Integer": "must be a whole number",
    "converted to Float": "must be a number",
    "not a valid bool": "must be true or false",
}


def type_message(error: OmegaConfBaseException, override: str = "") -> str:
    """OmegaConf's complaint in one line, after the override that it is about, or else the full key."""
    text = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    where = override or error.full_key
    if where and (wrong := _WRONG_TYPE.match(text)):
        return f"{override or f'{where}={wrong[1]}'}: {_MEANT[wrong[2]]}."
    if where and isinstance(error, MissingMandatoryValue):
        what = " Name the class, or a function, by its module." * where.endswith("._target_")
        return f"{where}: has no value, and needs one: {where}=...{what}"
    if where and re.match("Cannot merge DictConfig|Invalid type assigned", text):
        key = where.partition("=")[0]
        return f"{where}: must hold keys and their values: {key}.<key>=... or '{key}={{<key>:...}}'."
    if where and re.match(r"Key '\w+' not in '\w+'$", text):
        return f"{where}: there is no such key.{what_to_use(where) or did_you_mean(where, known_keys())}"
    if where and "is not a ListConfig, list or tuple" in text:
        return f"{where}: must be a list: {where.partition('=')[0]}=[...]."
    return f"{where}: {text}." if where else f"{text}."


def _unknown_keys(tree: dict[str, Any], section: Any, prefix: str) -> list[str]:
    fields = {field.name: field for field in dataclasses.fields(section)}
    where = f" in {prefix[:-1]}" if prefix else ""
    problems = []
    for name, value in tree.items():
        if name not in fields:
            hint = what_to_use(f"{prefix}{name}") or did_you_mean(name, fields)
            problems.append(f"{prefix}{name}: there is no such key{where}.{hint}")
        elif dataclasses.is_dataclass(fields[name].type) and isinstance(value, dict):
            problems += _unknown_keys(value, fields[name].type, f"{prefix}{name}.")
    return problems


def _broken_rules(section: Any, prefix: str) -> list[str]:
    problems = []
    for field in dataclasses.fields(section):
        value, key = getattr(section, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            problems += _broken_rules(value, f"{key}.")
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            problems.append(f"{key}={value}: must be a finite number.")
            continue
        rule = field.metadata.get("rule")
        if rule is not None and rule.words and value is None and field.default is not None:
            problems.append(f"{key}=null: must have a value; by default it is {field.default}.")
        if rule is not None and value is not None:
            problems += [f"{key}={value}: {text}" for text in _broken(rule, value)]
    return problems


def _broken(rule: Rule, value: Any) -> list[str]:
    if rule.choices:
        if value in rule.choices:
            return []
        if value == "False" and "off" in rule.choices:
            return ["write off; in a YAML with quotes, for there a bare off means false."]
        return [f"must be one of {', '.join(rule.choices)}.{did_you_mean(str(value), rule.choices)}"]
    if rule.words and type(value) is not int:
        return [] if value in rule.words else [f"must be a whole number, or {', '.join(rule.words)}."]
    holds = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}
    return [
        f"must be {name} {bound:g}." for name, bound in rule.bounds.items() if not holds[name](value, bound)
    ]


def _cross_checks(config: Config) -> list[str]:
    problems = []
    if config.train.steps is None and config.train.epochs is None:
        problems.append("train.epochs, train.steps: give one of them; both are null.")
    stop = config.stop
    if stop.metric is not None and stop.patience is None and stop.target is None:
        problems.append(f"stop.metric={stop.metric}: needs stop.patience or stop.target beside it.")
    warmup, cooldown = config.sched.get("warmup"), config.sched.get("cooldown")
    # one of yours may count steps
    is_wsd = config.sched.get("_target_") == "ddptrain.engine.lr_schedules.wsd"
    shares = [value for value in (warmup, cooldown) if isinstance(value, float | int)]
    if is_wsd and sum(shares) > 1:
        problems.append(
            f"sched.cooldown={cooldown}: with sched.warmup={warmup} it is longer than the run; together they"
            " may be 1 at most."
        )
    gpus, per_job = config.sweep.gpus, config.sweep.gpus_per_job
    plain = isinstance(gpus, list) and all(type(gpu) in (int, str) and str(gpu).strip() for gpu in gpus)
    if gpus != "auto" and not (plain and gpus and len({str(gpu) for gpu in gpus}) == len(gpus)):
        problems.append(
            f"sweep.gpus={gpus}: must be auto, or a list of GPUs, each once: 'sweep.gpus=[0,1]', or UUIDs."
        )
    if per_job != "all" and not (type(per_job) is int and per_job >= 1):
        problems.append(f"sweep.gpus_per_job={per_job}: must be a number of at least 1, or all.")
    problems += _search_checks(config.sweep)
    return problems


def _search_checks(sweep: Sweep) -> list[str]:
    problems = []
    if sweep.search == "grid" and sweep.trials is not None:
        problems.append(
            f"sweep.trials={sweep.trials}: is for a search, and a grid has all combinations."
            " Say sweep.search=tpe."
        )
    if sweep.search in ("tpe", "random", "cmaes") and sweep.trials is None:
        problems.append(f"sweep.search={sweep.search}: say how many points it tries: sweep.trials=30.")
    ways = sweep.objectives if isinstance(sweep.objectives, dict) else {}
    if sweep.objectives is not None and not (ways and all(way in ("max", "min") for way in ways.values())):
        problems.append(
            f"sweep.objectives={sweep.objectives}: must say max or min of each result:"
            " 'sweep.objectives={accuracy:max,seconds:min}'."
        )
    return problems
