"""The verbs on a run's folder: its saved config, and the words that are no overrides of it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from ddptrain.config.arguments import Arguments
from ddptrain.config.schema import Config
from ddptrain.errors import UserError
from ddptrain.keys import did_you_mean_path
from ddptrain.observe.mirror.layout import is_mirror
from ddptrain.verbs.argv import parse, split_words
from ddptrain.verbs.composing import OF_A_RUN, is_no_key

CHECKPOINT_WORDS = """\
  run=<folder>          the run, whose saved config is used; any of its keys may be overridden
  checkpoint=<which>    best (the default, where there is one), last, step-<n>, or a checkpoint's folder"""
"""Of the help of such a verb."""
_OF_WEIGHTS = ("ema", "init")
"""Sections that say which weights a training starts from and keeps."""


def read_run(arguments: Arguments) -> tuple[Config, Path, str]:
    """The config of the run that ``run=`` names, under the overrides; its folder; the checkpoint's name."""
    return _read_run(arguments, lambda name: name in OF_A_RUN)[:3]


def read_run_with_settings(
    arguments: Arguments, own: Collection[str] = ()
) -> tuple[Config, Path, str, dict[str, str]]:
    """The same, and the words that are no keys of the config: for the run's task, a prompt or a picture.
    own: keys of the config that are the verb's own words."""
    return _read_run(arguments, lambda name: name in ("seed", *OF_A_RUN, *own) or is_no_key(name))


def read_run_to_load(words: Sequence[str]) -> tuple[Config, Path, str]:
    """The run's config, its folder and the checkpoint's name, by the words of the verb ``evaluate``."""
    from ddptrain.config.limits import resolvers_restored

    arguments = parse(["evaluate", *words])
    with resolvers_restored():
        return read_run(arguments)


def _read_run(
    arguments: Arguments, is_setting: Callable[[str], bool]
) -> tuple[Config, Path, str, dict[str, str]]:
    """The run's config under the overrides, its folder, the checkpoint's name, and the verb's own words."""
    from ddptrain.config.check import checked
    from ddptrain.config.compose import saved_tree
    from ddptrain.config.search_path import open_user_code

    open_user_code(arguments.config_dirs, arguments.trusted)
    own, overrides = split_words(arguments.overrides, is_setting)
    given = [word for word in overrides if "=" not in word and Path(word).is_dir()]
    if given and "run" not in own:
        raise UserError(f"{given[0]}: a run is named by run=. Did you mean run={given[0]}?")
    folder = run_folder(arguments.verb, own)
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
        requested, known = (vars(getattr(of, section)) for of in (config, saved))
        for name, value in requested.items():
            if value != known[name]:
                here, there = ("null" if of is None else of for of in (value, known[name]))
                raise UserError(
                    f"{section}.{name}={here}: the run was trained with {there}, and {verb} takes the"
                    " checkpoint's weights as they are, the averaged ones if there are some. Leave it out;"
                    " those that are not averaged are had by: checkpoint convert weights=model."
                )


def place_of(run: str, checkpoints: bool = True) -> Path:
    """A run's folder, or a copy of its mirror. checkpoints: are needed."""
    if not is_mirror(run):
        return Path(run)
    from ddptrain.observe.mirror.restore import local_copy  # imports torch

    return local_copy(run, "run", checkpoints)


def run_folder(verb: str, own: Mapping[str, str]) -> Path:
    """The folder that ``run=`` names."""
    if not own.get("run"):
        raise UserError(f"{verb}: name the run's folder: {verb} run=runs/<recipe>/<time>-<id>")
    folder = place_of(own["run"])
    if not folder.exists():
        raise UserError(f"run={folder}: there is no such folder.{did_you_mean_path(folder)}")
    if not (folder / "config.yaml").is_file():
        inside = sorted(path.parent.name for path in folder.glob("*/config.yaml"))
        hint = f" Did you mean run={folder / inside[-1]}?" if inside else ""
        raise UserError(f"run={folder}: is no run's folder; it holds no config.yaml.{hint}")
    return folder
