"""The verbs on a run's folder: its saved config, and the words that are no overrides of it."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ddptrain.cli.argv import Arguments, action_of, divided, parse
from ddptrain.cli.compose import saved_tree
from ddptrain.cli.search_path import open_user_code
from ddptrain.config.check import checked
from ddptrain.config.limits import resolvers_restored
from ddptrain.config.schema import Config
from ddptrain.errors import KNOWN_ENDS, ExitCode, UserError
from ddptrain.launcher.spinning import choose_spinning

_OF_A_RUN = ("run", "checkpoint")
_OF_WEIGHTS = ("ema", "init")
"""Sections that say which weights a training starts from and keeps."""
_CHECKPOINT_ACTIONS = ("verify", "show", "convert")


def on_saved_run(arguments: Arguments) -> int:
    """The verbs ``evaluate``, ``predict`` and ``export``: on the run that ``run=`` names, with its saved
    config under the overrides. The other words are for the run's task: a prompt, a picture."""
    evaluates = arguments.verb == "evaluate"  # of a task it asks nothing
    config, folder, checkpoint, own = _asked(arguments, _is_of_a_run if evaluates else is_no_key)
    choose_spinning()
    from ddptrain.commands import evaluate, export, predict

    command = {"evaluate": evaluate, "predict": predict, "export": export}[arguments.verb]
    with recorded():
        command.run(config, folder, checkpoint, *([] if evaluates else [own]))
    return ExitCode.DONE


def asked_to_load(words: Sequence[str]) -> tuple[Config, Path, str]:
    """The run's config, its folder and the checkpoint's name, by the words of the verb ``evaluate``."""
    arguments = parse(["evaluate", *words])
    open_user_code(arguments.config_dirs)
    with resolvers_restored():
        return _asked(arguments, _is_of_a_run)[:3]


def checkpoint(arguments: Arguments) -> int:
    action, words = action_of(arguments, _CHECKPOINT_ACTIONS, "run=runs/<recipe>/<time>-<id>")
    own, rest = divided(words, str.isidentifier)
    if rest:
        raise UserError(f"{rest[0]}: checkpoint {action} takes words of the form name=value only.")
    folder = _run_folder(f"checkpoint {action}", own)
    recipe = str(saved_tree(folder / "config.yaml", arguments, []).get("recipe"))
    del own["run"]
    from ddptrain.commands import checkpoint

    with recorded():
        checkpoint.run(action, checkpoint.RunFolder(folder, recipe), own)
    return ExitCode.DONE


@contextmanager
def recorded() -> Iterator[None]:
    """Inside, a crash is recorded for torchrun, which then shows its traceback. Known ends are no crash."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    try:
        yield
    except KNOWN_ENDS:
        raise
    except Exception as error:
        handler.record_exception(error)
        raise


def is_no_key(name: str) -> bool:
    """Whether a word is the verb's own, not an override of the config."""
    of_config = {field.name for field in dataclasses.fields(Config)} - {"seed", *_OF_A_RUN}
    return name.isidentifier() and name not in of_config


def _is_of_a_run(name: str) -> bool:
    return name in _OF_A_RUN


def _asked(arguments: Arguments, is_own: Callable[[str], bool]) -> tuple[Config, Path, str, dict[str, str]]:
    """The run's config under the overrides, its folder, the checkpoint's name, and the verb's own words."""
    own, overrides = divided(arguments.overrides, is_own)
    folder = _run_folder(arguments.verb, own)
    config = checked(saved_tree(folder / "config.yaml", arguments, overrides))
    if any(word.lstrip("+~").startswith(_OF_WEIGHTS) for word in overrides):
        _check_weights(config, checked(saved_tree(folder / "config.yaml", arguments, [])), arguments.verb)
    checkpoint = own.pop("checkpoint", "")
    del own["run"]
    return config, folder, checkpoint, own


def _check_weights(config: Config, saved: Config, verb: str) -> None:
    """Raises UserError for overrides that ask for other weights than a checkpoint has: nothing would come of
    them."""
    for section in _OF_WEIGHTS:
        asked, known = (vars(getattr(of, section)) for of in (config, saved))
        for name, value in asked.items():
            if value != known[name]:
                here, there = ("null" if of is None else of for of in (value, known[name]))
                raise UserError(
                    f"{section}.{name}={here}: the run was trained with {there}, and {verb} takes the"
                    " checkpoint's weights as they are, the averaged ones if there are some. Leave it out;"
                    " those that are not averaged are had by: checkpoint convert weights=model."
                )


def _run_folder(verb: str, own: Mapping[str, str]) -> Path:
    """The folder that ``run=`` names."""
    if not own.get("run"):
        raise UserError(f"{verb}: name the run's folder: {verb} run=runs/<recipe>/<time>-<id>")
    folder = Path(own["run"])
    if not (folder / "config.yaml").is_file():
        inside = sorted(path.parent.name for path in folder.glob("*/config.yaml"))
        hint = f" Did you mean run={folder / inside[-1]}?" if inside else ""
        raise UserError(f"run={folder}: is no run's folder; it holds no config.yaml.{hint}")
    return folder
