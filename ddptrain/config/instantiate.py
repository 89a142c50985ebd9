"""The one door from a config node to an object.

A node is ``{"_target_": "package.module.Name", **arguments}``. A config can come from anywhere, so
a name is checked twice before it is called: as written, before anything is imported, and as the
object it led to, so that ``ddptrain.recipes.cnn.os.system`` gets nowhere. What it makes is checked too: a
module, an optimizer, or what the argument is annotated with. Hydra's ``instantiate`` is not used: its block
list is no security boundary (1.3.8 lets a config call ``os._exit``).
"""

import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, Union

from ddptrain.config.arguments import GROUPS
from ddptrain.config.targets import LIBRARIES, Node, hints_of, resolve, result_type
from ddptrain.errors import UserError
from ddptrain.keys import did_you_mean

_DOWNLOADS = ("weights", "weights_backbone", "pretrained", "pretrained_backbone")
"""Arguments by which torchvision fetches a file and unpickles it."""
_LISTS = (list, tuple, Sequence, Iterable)
_MAPPINGS = (dict, Mapping)


def check_node(node: Node, key: str, offered: Sequence[str] | None = ()) -> list[str]:
    """What is wrong with a node: unknown, missing or ill-typed arguments, nested nodes included.

    ``offered`` names the arguments that `build` will be given beside the node's own; None where only
    the caller of the built factory knows, and nothing can be called missing.
    """
    try:
        target = resolve(node, key)
    except UserError as error:
        return [str(error)]
    parameters, open_ended = _parameters(target)
    hints = hints_of(target)
    problems = []
    for name, value in node.items():
        if name == "_target_":
            continue
        problems += _hidden_nodes(value, hints.get(name, Any), f"{key}.{name}") + _downloads(node, name, key)
        if not isinstance(name, str):
            problems.append(f"{key}.{name}: is no name of an argument.")
        elif name.startswith("_") and name not in parameters:
            problems.append(f"{key}.{name}: only _target_ has a meaning here; remove it.")
        elif name not in parameters and not open_ended:
            known = [known for known in parameters if known not in (offered or ())]
            hint = did_you_mean(f"{key}.{name}", [f"{key}.{other}" for other in known])
            if not hint:
                takes = f" It takes {', '.join(known)}." if known else ""
                hint = f"{takes} '~{key}.{name}' takes this one out, where a config sets it."
            problems.append(f"{key}.{name}: {node['_target_']} takes no such argument.{hint}")
        else:
            problems += _wrong_value(value, hints.get(name, Any), f"{key}.{name}")
    for name, default in parameters.items() if offered is not None else []:
        if default is inspect.Parameter.empty and name not in node and name not in (offered or ()):
            problems.append(f"{key}.{name}: {node['_target_']} needs it; set {key}.{name}=...")
    return problems


def _wrong_value(value: Any, hint: Any, key: str) -> list[str]:
    """What is wrong with an argument, for its annotation."""
    item = _item_of(hint, _MAPPINGS)
    if item is not None and isinstance(value, Mapping) and not _is_node(value):
        return list(chain(*(_wrong_value(one, item, f"{key}.{name}") for name, one in value.items())))
    if nodes := _nodes_of(value, hint, key):
        return list(chain(*(check_node(node, at) or _misplaced(node, its, at) for node, its, at in nodes)))
    if isinstance(value, str) and (problem := _refused_by(hint, value)):
        return [f"{key}={value}: {problem}"]
    if not _fits(value, hint):
        meant = f" Did you mean {key}._target_={value}?" * _names_a_target(value, hint)
        return [f"{key}={value}: must be {_spell(hint)}.{meant}"]
    return []


def build(node: Node, key: str, **offered: Any) -> Any:
    """Call the node's target with its arguments and with those offered that it has a name for.

    Raises UserError where the target is not allowed or refuses an argument's value.
    """
    target = resolve(node, key)
    parameters, open_ended = _parameters(target)
    hints = hints_of(target)
    for name, value in node.items():
        where = f"{key}.{name}"
        annotation = hints.get(name, Any)
        wrong = _hidden_nodes(value, annotation, where) + _downloads(node, name, key)
        for nested, hint, place in _nodes_of(value, annotation, where):
            wrong += _misplaced(nested, hint, place)
        if wrong:
            raise UserError(wrong[0])
    arguments = {name: _built(value, f"{key}.{name}") for name, value in node.items() if name != "_target_"}
    for name, value in offered.items():
        if name in parameters or open_ended:
            arguments.setdefault(name, value)
    if node["_target_"].startswith("torchvision."):  # some download a backbone unless they are told not to
        arguments = {**{name: None for name in _DOWNLOADS if name in parameters}, **arguments}
    _check_match(target, node, key, arguments, offered)
    try:
        result = target(**arguments)
    except UserError:
        raise
    except (ValueError, OSError) as error:  # a value, or a file that is not there
        raise UserError(f"{key} ({node['_target_']}): {error}") from error
    except Exception as error:  # **kwargs hide the names and types that check_node would compare
        unknown = open_ended and isinstance(error, TypeError) and "unexpected keyword argument" in str(error)
        if unknown or node["_target_"].startswith(LIBRARIES):
            raise UserError(f"{key} ({node['_target_']}): {error}") from error
        raise
    if result is None:
        raise UserError(f"{key} ({node['_target_']}): returns None; it must return what it makes.")
    return result


def _built(value: Any, key: str) -> Any:
    if _is_node(value):
        return build(value, key)
    if isinstance(value, list):
        return [_built(item, f"{key}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {name: _built(item, f"{key}.{name}") for name, item in value.items()}
    return value


def _refused_by(hint: Any, value: str) -> str | None:
    """What a text type of the recipe's own (a class derived from str) says is wrong, by its ``problem``."""
    own = inspect.isclass(hint) and issubclass(hint, str) and hint is not str
    problem: str | None = hint.problem(value) if own else None
    return problem


def _parameters(target: Callable[..., Any]) -> tuple[dict[str, Any], bool]:
    """The defaults of a target's named parameters, and whether it takes any other name too."""
    parameters = inspect.signature(target).parameters
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = {name: parameter.default for name, parameter in parameters.items() if parameter.kind not in kinds}
    return named, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def _check_match(target: Callable[..., Any], node: Node, key: str, arguments: Node, offered: Node) -> None:
    """Refuse parts of a config that don't go together: a text model for pictures, say."""
    hints = hints_of(target)
    for name, value in offered.items():
        hint = hints.get(name)
        if arguments.get(name) is value and inspect.isclass(hint) and not _may_be(value, hint):
            raise UserError(
                f"{key}: {node['_target_']} needs {hint.__name__} as its {name}, not {type(value).__name__}."
                f" Choose another {name}=..., or another recipe."
            )
    for name, default in _parameters(target)[0].items():
        if default is inspect.Parameter.empty and name not in arguments:
            advice = f"Choose another {key}=..., or set {key}.{name}=..."
            if name in GROUPS:  # taken out by ~model
                advice = f"Choose one: {name}=..."
            raise UserError(
                f"{key}: {node['_target_']} needs {name}, which this recipe does not give; it gives"
                f" {', '.join(offered) or 'nothing'}. {advice}"
            )


def _may_be(value: object, hint: type) -> bool:
    """Whether a value is of a type, as far as that can be told: not of Any, nor of a plain Protocol."""
    try:
        return isinstance(value, hint)
    except TypeError:
        return True


def typed_arguments(
    function: Callable[..., Any], words: Mapping[str, str], verb: str, others: Sequence[str] = ()
) -> dict[str, Any]:
    """A verb's key=value words as keyword arguments of a function, typed by its annotations.

    others: words that the verb takes beside these. The first parameter of a function is the caller's (a
    model, a folder), and not among them; a class takes all of its own. Raises UserError naming every wrong
    word at once.
    """
    hints = hints_of(function)
    first = 0 if inspect.isclass(function) else 1
    parameters = dict(list(inspect.signature(function).parameters.items())[first:])
    arguments: dict[str, Any] = {}
    problems = []
    for name, word in words.items():
        if name not in parameters:
            known = [*parameters, *others]
            hint = did_you_mean(name, known) or f" There are {', '.join(known)}."
            problems.append(f"{name}: {verb} takes no such word.{hint}")
            continue
        hint = hints.get(name, str)
        arguments[name] = _typed(word, hint)
        if not _fits(arguments[name], hint):
            problems.append(f"{name}={word}: must be {_spell(hint)}.")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in words:
            problems.append(f"{name}: {verb} needs it: {name}=..., {_spell(hints.get(name, str))}.")
    if problems:
        raise UserError("\n".join(problems))
    return arguments


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The parts of a union, or the one annotation."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def _typed(word: str, hint: Any) -> Any:
    """A word as the first type (int, float, bool, None) of its annotation that can read it, else as text."""
    kinds = _alternatives(hint)
    if word == "null" and type(None) in kinds:
        return None
    for kind in kinds:
        if kind is bool and word in ("true", "false"):
            return word == "true"
        if kind in (int, float):
            try:
                return kind(word)
            except ValueError:
                continue
    return word


def _is_node(value: Any) -> bool:
    return isinstance(value, Mapping) and "_target_" in value


def _nodes_of(value: Any, hint: Any, key: str) -> list[tuple[Node, Any, str]]:
    """The nodes that an argument is made of: itself, items of a list, or values of a mapping annotated as
    one; each with its annotation and key."""
    if _is_node(value):
        return [(value, hint, key)]
    values = _item_of(hint, _MAPPINGS)
    if isinstance(value, Mapping) and values is not None:
        return [(node, values, f"{key}.{name}") for name, node in value.items() if _is_node(node)]
    if not isinstance(value, list) or (inspect.isclass(hint) and hint not in (Any, list)):
        return []  # Any is a class since Python 3.11
    item = _item_of(hint, _LISTS) or Any
    return [(node, item, f"{key}[{i}]") for i, node in enumerate(value) if _is_node(node)]


def _item_of(hint: Any, kinds: Sequence[Any]) -> Any | None:
    """What a list, or the values of a mapping, are annotated with; None where the argument is no such."""
    for kind in _alternatives(hint):
        if typing.get_origin(kind) in kinds:
            return typing.get_args(kind)[-1 if kinds is _MAPPINGS else 0]
    return None


def _hidden_nodes(value: Any, hint: Any, key: str, depth: int = 0) -> list[str]:
    """Nodes where nothing would be built of them: deeper than in an argument, in a list that is one, or in a
    mapping that is annotated as one."""
    holds_nodes = depth == 0 and (isinstance(value, list) or _item_of(hint, _MAPPINGS) is not None)
    if isinstance(value, Mapping):
        inner = {} if _is_node(value) else {f"{key}.{name}": item for name, item in value.items()}
    else:
        inner = {f"{key}[{i}]": item for i, item in enumerate(value)} if isinstance(value, list) else {}
    problems = []
    for where, item in inner.items():
        if _is_node(item) and not holds_nodes:
            problems.append(
                f"{where}._target_: a node can only be an argument itself, or in a list that is one; move it."
            )
        problems += _hidden_nodes(item, Any, where, depth + 1)
    return problems


def _downloads(node: Node, name: str, key: str) -> list[str]:
    """torchvision's own ways to fetch weights and unpickle them."""
    would_download = name in _DOWNLOADS and node[name] not in (None, False)
    if not would_download or not str(node["_target_"]).startswith("torchvision."):
        return []
    return [
        f"{key}.{name}={node[name]}: torchvision would download a file and unpickle it; set it to null. Start"
        " from weights by init.weights=torchvision:DEFAULT, or a file."
    ]


def _misplaced(node: Node, hint: Any, key: str) -> list[str]:
    """A nested node must make what its argument is annotated with; checked before it is built."""
    wanted = [kind for kind in _alternatives(hint) if kind is not type(None)]
    is_class = (inspect.isclass(kind) and kind is not Any for kind in wanted)
    if not all(is_class) or any(typing.Protocol in kind.__mro__ for kind in wanted):
        return []  # a Callable, say: any object may be one
    result = result_type(resolve(node, key))
    if result is None or any(issubclass(result, kind) for kind in wanted):
        return []
    return [f"{key}._target_={node['_target_']}: must make {' or '.join(k.__name__ for k in wanted)}."]


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain config value fits an annotation; what can't be judged is let through."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, typing.TypeVar):
        return True
    if len(kinds := _alternatives(hint)) > 1:
        return any(_fits(value, kind) for kind in kinds)
    if origin is Literal:
        return value in args
    if hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is bool:
        return isinstance(value, bool)
    if inspect.isclass(hint) and issubclass(hint, str):
        return isinstance(value, str)
    kind = origin or hint
    if kind is tuple and args and args[-1] is not Ellipsis:
        return isinstance(value, list) and len(value) == len(args) and all(map(_fits, value, args))
    if kind in (tuple, list, Sequence):
        return isinstance(value, list) and all(_fits(item, args[0]) for item in value if args)
    if kind in (dict, Mapping):
        return isinstance(value, Mapping)
    return not inspect.isclass(hint)  # an object needs a node of its own


def _names_a_target(value: Any, hint: Any) -> bool:
    """Whether an object is wanted, and this is a dotted name, perhaps of what makes one."""
    objects = [kind for kind in _alternatives(hint) if inspect.isclass(kind) and not _is_plain(kind)]
    return bool(objects) and isinstance(value, str) and "." in value.strip(".")


def _is_plain(kind: type) -> bool:
    return kind in (float, int, bool, type(None), dict, list, tuple) or issubclass(kind, str)


def _spell(hint: Any) -> str:
    names = {float: "a finite number", int: "a whole number", bool: "true or false", str: "text"}
    names[type(None)] = "null"
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if len(kinds := _alternatives(hint)) > 1:
        plain = [_spell(kind) for kind in kinds if kind in names or typing.get_origin(kind)]
        classes = [kind.__name__ for kind in kinds if inspect.isclass(kind) and kind not in names]
        if float in kinds:  # a rate of torch's may be a Tensor, too, which no config makes
            classes = [name for name in classes if name != "Tensor"]
        return " or ".join([*plain, *([f"keys with a _target_ ({', '.join(classes)})"] if classes else [])])
    if origin is tuple and Ellipsis not in args:
        return f"a list of {len(args)} values: [...]"
    if origin in (tuple, list, Sequence):
        return "a list: [...]"
    if origin is Literal:
        return "one of " * (len(args) > 1) + ", ".join(map(str, args))
    if inspect.isclass(hint) and not _is_plain(hint):
        return f"keys with a _target_ ({hint.__name__})"
    return names.get(hint) or str(getattr(hint, "__name__", hint))
