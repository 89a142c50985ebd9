"""What a verb of the command line is; an installed package may bring one (docs/verbs.md)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from ddptrain.config.arguments import Arguments

Options = Callable[[Sequence[str]], Mapping[str, bool]]
"""Of the words of a command line: options that are the verb's own by name, and whether each takes a value."""


@final
@dataclass(frozen=True, slots=True)
class Verb:
    """``python -m ddptrain <verb> [words]``. Found by the entry point of its name in the group
    ``ddptrain.verbs``.

    Its module is imported for each ``--help``, so it should import little beside this: no torch.
    """

    run: Callable[[Arguments], int]
    """Returns the exit code (`ddptrain.errors.ExitCode`). Raises UserError for what the user can mend."""
    summary: str
    """One line, for the list of all verbs."""
    help: str = ""
    """What ``--help`` prints. Completion offers each ``name=`` in it. Empty: as of a training, all keys."""
    composes: bool = False
    """Whether its words compose a config, as those of a training do."""
    of_a_run: bool = False
    """Whether its words are overrides of a run's saved config."""
    options: Options = lambda _: {}
