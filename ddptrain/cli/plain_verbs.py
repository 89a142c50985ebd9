"""The verbs that compose no config, and so need no Hydra."""

from pathlib import Path

from ddptrain.cli.argv import Arguments, divided
from ddptrain.errors import ExitCode, UserError


def report(arguments: Arguments) -> int:
    own, folders = divided(arguments.overrides, str.isidentifier)
    from ddptrain.commands import report

    report.run([Path(folder) for folder in folders], own)
    return ExitCode.DONE


def doctor(arguments: Arguments) -> int:
    own, rest = divided(arguments.overrides, str.isidentifier)
    if rest:
        raise UserError(
            f"{rest[0]}: doctor takes words of the form name=value only: doctor --help lists them."
        )
    from ddptrain.commands import doctor

    return doctor.run(own, as_json="--json" in arguments.options, cluster="--cluster" in arguments.options)


def completion(arguments: Arguments) -> int:
    """Print what a shell evaluates to complete the words of ``ddptrain``."""
    from ddptrain.cli.completion import SCRIPTS

    shell = " ".join(arguments.overrides)
    if shell not in SCRIPTS:
        raise UserError(f"completion {shell}: say for which shell: completion {'|'.join(SCRIPTS)}")
    print(SCRIPTS[shell])
    return ExitCode.DONE


VERBS = {"report": report, "doctor": doctor, "completion": completion}
