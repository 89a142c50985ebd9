"""The command line: ``-m ddptrain [verb] [overrides]``.

Nothing here imports torch before the config is known to be good, so ``--cfg job`` and a typo's message come
at once; nor Hydra before there is a config to compose, so help and completion do.
"""

import io
import os
import select
import sys
import time
from collections.abc import Callable, Sequence

from ddptrain.config.arguments import Arguments
from ddptrain.config.choices import yaml_folders
from ddptrain.distributed.launcher.process import end_with_agent
from ddptrain.errors import Diverged, ExitCode, OutOfStep, RankLost, Stopped, UserError, what_ended
from ddptrain.text import last_words
from ddptrain.verbs.argv import parse
from ddptrain.verbs.help import overview
from ddptrain.verbs.installed import verb_named
from ddptrain.verbs.script import with_script
from ddptrain.version import __version__

_WAIT_FOR_FIRST_RANK_S = 30.0
"""Longer than rank 0 takes to write its last files; when it exits, torchrun ends the others."""
_WAIT_FOR_FIRST_ON_NODE_S = 5.0
"""Added for the other ranks of a node: its first one prints earlier, and its exit makes torchrun end them."""
_BY_SIGPIPE = 141
"""What a shell says of a program that ended so."""


def main(words: Sequence[str], work: Callable[[Arguments], int] | None = None) -> int:
    """Run a command line; returns the exit code. work: done in place of the verb's own."""
    end_with_agent()
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr does: a name may hold what the terminal lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        arguments = parse(words)
        if "--version" in words:
            print(f"ddptrain {__version__}")
            return ExitCode.DONE
        verb = verb_named(arguments.verb)
        if arguments.asks_help and verb.help:
            print(verb.help)
            return ExitCode.DONE
        if arguments.asks_help and not arguments.overrides:
            print(overview(yaml_folders(arguments.config_dirs)))
            return ExitCode.DONE
        code = (work or verb.run)(with_script(arguments, verb.composes))
        sys.stdout.flush()  # while a reader that has ended is still met here
        return code
    except UserError as error:
        _print_once(error, error.everywhere)
        return ExitCode.USER_ERROR
    except (Diverged, OutOfStep) as error:
        _print_once(error, everywhere=True)
        return ExitCode.DIVERGED if isinstance(error, Diverged) else ExitCode.CRASH
    except RankLost as error:
        if str(error):
            last_words(str(error), error.shown)
        return error.code
    except Stopped:  # the log has said so
        return ExitCode.STOPPED
    except BrokenPipeError:
        if not _nobody_reads_stdout():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        return _BY_SIGPIPE
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as error:
        last_words(what_ended(error), shown=False)  # the traceback is
        raise


def _nobody_reads_stdout() -> bool:
    """Whether a pipe's reader has ended: ``| head`` has seen enough."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _print_once(error: Exception, everywhere: bool) -> None:
    """Print what ends the run. Ranks that know rank 0 prints it wait for that: the first rank to exit
    makes torchrun end the others. If none does, they print it after all: rank 0 has not met it (it is on
    another node, where a folder is)."""
    if everywhere and os.environ.get("RANK", "0") != "0":
        is_first_on_node = os.environ.get("LOCAL_RANK") == "0"
        time.sleep(_WAIT_FOR_FIRST_RANK_S + _WAIT_FOR_FIRST_ON_NODE_S * (not is_first_on_node))
    last_words(str(error))
