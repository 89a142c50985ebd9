"""``completion``: what a shell evaluates to complete the words of ``ddptrain``."""

from ddptrain.config.arguments import Arguments
from ddptrain.errors import ExitCode, UserError
from ddptrain.verbs.verb import Verb

HELP = """\
ddptrain completion bash|zsh

Prints what the shell needs to complete verbs, options, keys, choices, recipes and run folders of the command
ddptrain. One line in ~/.bashrc or ~/.zshrc installs it:

  eval "$(ddptrain completion bash)"
  eval "$(ddptrain completion zsh)\""""


def completion(arguments: Arguments) -> int:
    from ddptrain.verbs.complete import SCRIPTS

    shell = " ".join(arguments.overrides)
    if shell not in SCRIPTS:
        raise UserError(f"completion {shell}: say for which shell: completion {'|'.join(SCRIPTS)}")
    print(SCRIPTS[shell])
    return ExitCode.DONE


VERB = Verb(
    run=completion,
    summary="complete these words in bash or zsh",
    help=HELP,
)
