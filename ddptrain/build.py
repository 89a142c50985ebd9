"""The one door from a config node to an object.

A node is ``{"_target_": "package.module.Name", **arguments}``. A config can come from anywhere, so
a name is checked twice before it is called: as written, before anything is imported, and as the
object it led to, so that ``ddptrain.recipes.cnn.os.system`` gets nowhere. Hydra's ``instantiate``
is not used: its block list is no security boundary (1.3.8 lets a config call ``os._exit``).
"""

import importlib
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

from ddptrain.config.suggest import did_you_mean
from ddptrain.errors import UserError

Node = Mapping[str, Any]

ALLOWED = ("ddptrain.recipes.", "ddptrain.data.", "torch.nn.", "torch.optim.", "torchvision.models.")
FUNCTIONS_ALLOWED = ("ddptrain.recipes.", "torchvision.models.")
_opened: set[str] = set()


def open_package(name: str) -> None:
    """Let configs name what is defined in this top-level package or module of the user's."""
    _opened.add(f"{name}.")


def check_node(node: Node, key: str, offered: Sequence[str] | None = ()) -> list[str]:
    """What is wrong with a node: unknown, missing or ill-typed arguments, nested nodes included.

    ``offered`` names the arguments that `build` will be given beside the node's own; None where only
    the caller of the built factory knows, and nothing can be called missing.
    """
    try:
        target = _resolve(node, key)
    except UserError as error:
        return [str(error)]
    signature, hints = inspect.signature(target), _hints(target)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    names = [n for n, p in signature.parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    problems = []
    for name, value in node.items():
        if name == "_target_":
            continue
        if name.startswith("_") and name not in names:
            problems.append(f"{key}.{name}: only _target_ has a meaning here; remove it.")
        elif name not in names and not open_ended:
            hint = did_you_mean(f"{key}.{name}", [f"{key}.{known}" for known in names])
            problems.append(f"{key}.{name}: {node['_target_']} takes no such argument.{hint}")
        elif _is_node(value):
            problems += check_node(value, f"{key}.{name}")
        elif not _fits(value, hints.get(name, Any)):
            problems.append(f"{key}.{name}={value}: must be {_spell(hints[name])}.")
    for name in names if offered is not None else []:
        needed = signature.parameters[name].default is inspect.Parameter.empty
        if needed and name not in node and name not in (offered or ()):
            problems.append(f"{key}.{name}: {node['_target_']} needs it; set {key}.{name}=...")
    return problems


def build(node: Node, key: str, **offered: Any) -> Any:
    """Call the node's target with its arguments and with those offered that it has a name for.

    Raises UserError where the target is not allowed or refuses an argument's value.
    """
    target = _resolve(node, key)
    parameters = inspect.signature(target).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = {
        name: build(value, f"{key}.{name}") if _is_node(value) else value
        for name, value in node.items()
        if name != "_target_"
    }
    for name, value in offered.items():
        if name in parameters or open_ended:
            arguments.setdefault(name, value)
    _check_match(target, node, key, arguments, offered)
    try:
        return target(**arguments)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{key} ({node['_target_']}): {error}") from error
    except TypeError as error:  # **kwargs hide the names that check_node would compare
        if open_ended and "unexpected keyword argument" in str(error):
            raise UserError(f"{key} ({node['_target_']}): {error}") from error
        raise


def _check_match(target: Callable[..., Any], node: Node, key: str, arguments: Node, offered: Node) -> None:
    """Refuse parts of a config that don't go together: a text model for pictures, say."""
    hints = _hints(target)
    for name, value in offered.items():
        hint = hints.get(name)
        if arguments.get(name) is value and inspect.isclass(hint) and not isinstance(value, hint):
            raise UserError(
                f"{key}: {node['_target_']} needs {hint.__name__} as its {name}, not {type(value).__name__}."
                f" Choose another {name}=..., or another recipe."
            )
    for name, parameter in inspect.signature(target).parameters.items():
        named = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if named and parameter.default is parameter.empty and name not in arguments:
            raise UserError(
                f"{key}: {node['_target_']} needs {name}, which this recipe does not give; it gives"
                f" {', '.join(offered) or 'nothing'}. Choose another {key}=..., or set {key}.{name}=..."
            )


def typed_arguments(function: Callable[..., Any], words: Mapping[str, str], verb: str) -> dict[str, Any]:
    """A verb's key=value words as keyword arguments of a function, typed by its annotations.

    The function's first parameter, the model, is not among them. Raises UserError naming every wrong word at
    once.
    """
    hints = _hints(function)
    parameters = dict(list(inspect.signature(function).parameters.items())[1:])
    arguments: dict[str, Any] = {}
    problems = []
    for name, word in words.items():
        if name not in parameters:
            hint = did_you_mean(name, parameters) or f" There are {', '.join(parameters)}."
            problems.append(f"{name}: {verb} takes no such word.{hint}")
            continue
        hint = hints.get(name, str)
        arguments[name] = _typed(word, hint)
        if not _fits(arguments[name], hint):
            problems.append(f"{name}={word}: must be {_spell(hint)}.")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in words:
            problems.append(f"{name}: {verb} needs it: {name}=...")
    if problems:
        raise UserError("\n".join(problems))
    return arguments


def _typed(word: str, hint: Any) -> Any:
    """A word as the first type (int, float, bool, None) of its annotation that can read it, else as text."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        kinds = typing.get_args(hint)
        if word == "null" and type(None) in kinds:
            return None
    else:
        kinds = (hint,)
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


def _resolve(node: Node, key: str) -> Callable[..., Any]:
    name = node.get("_target_")
    if not isinstance(name, str):
        raise UserError(f"{key}._target_: needs the dotted name of a class, not {name!r}.")
    if not _allowed(name, ALLOWED):
        raise UserError(
            f"{key}._target_={name}: not allowed. Allowed are {', '.join(a + '*' for a in ALLOWED)}"
            " and your own modules (in the folder of --config-dir, the current folder, or an"
            " installed package with the entry point group ddptrain.conf)."
        )
    if any(part.startswith("_") for part in name.split(".")):
        raise UserError(f"{key}._target_={name}: names something private; name what is public.")
    found = _import(name, key)
    home = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"
    # a function of a module, not a method: called as a function, that would take any object as its self
    plain_function = inspect.isfunction(found) and "." not in found.__qualname__
    if not (inspect.isclass(found) or (plain_function and _allowed(name, FUNCTIONS_ALLOWED))):
        raise UserError(f"{key}._target_={name}: must be a class, not {type(found).__name__}.")
    if not _allowed(home, ALLOWED):
        raise UserError(f"{key}._target_={name}: leads to {home}, which is not allowed.")
    if inspect.isabstract(found):
        raise UserError(f"{key}._target_={name}: is an abstract class; name one that derives from it.")
    try:
        inspect.signature(found)
    except ValueError as error:  # classes written in C, metaclasses
        raise UserError(f"{key}._target_={name}: can't be built from a config.") from error
    return typing.cast(Callable[..., Any], found)


def _allowed(name: str, prefixes: Sequence[str]) -> bool:
    return name.startswith((*prefixes, *_opened))


def _import(name: str, key: str) -> Any:
    parts = name.split(".")
    for split in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:split])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
                continue
            raise  # the module exists, but something that it imports does not
        for position, part in enumerate(parts[split:], split):
            if not hasattr(found, part):
                where = ".".join(parts[:position])
                public = [n for n in vars(found) if not n.startswith("_")]
                raise UserError(f"{key}._target_={name}: {where} has no {part}.{did_you_mean(part, public)}")
            found = getattr(found, part)
        return found
    raise UserError(f"{key}._target_={name}: there is no module {parts[0]}.")


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    function = target.__init__ if inspect.isclass(target) else target
    try:
        return typing.get_type_hints(function)
    except NameError:  # annotations that exist for type checkers only
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain config value fits an annotation; what can't be judged is let through."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, typing.TypeVar):
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if hint is None or hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (bool, str):
        return isinstance(value, hint)
    if origin is tuple:
        if not isinstance(value, list):
            return False
        if len(args) == 2 and args[1] is Ellipsis:
            return all(_fits(item, args[0]) for item in value)
        return len(value) == len(args) and all(map(_fits, value, args))
    if origin in (list, Sequence):
        return isinstance(value, list) and all(_fits(item, args[0]) for item in value)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping)
    if hint in (list, tuple, dict):
        return isinstance(value, dict if hint is dict else list)
    return not inspect.isclass(hint)  # an object needs a node of its own


def _spell(hint: Any) -> str:
    names = {
        float: "a finite number",
        int: "a whole number",
        bool: "true or false",
        str: "text",
        type(None): "null",
    }
    if typing.get_origin(hint) in (Union, types.UnionType):
        plain = [arg for arg in typing.get_args(hint) if arg in names or typing.get_origin(arg)]
        return " or ".join(_spell(arg) for arg in plain)
    if typing.get_origin(hint) is tuple and Ellipsis not in typing.get_args(hint):
        return f"a list of {len(typing.get_args(hint))} values: [...]"
    if typing.get_origin(hint) in (tuple, list, Sequence):
        return "a list: [...]"
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    return names.get(hint) or str(getattr(hint, "__name__", hint))
