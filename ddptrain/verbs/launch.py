"""``launch``: torchrun, with the config checked before a rank starts."""

import os
from collections.abc import Mapping, Sequence

from ddptrain.config.arguments import Arguments
from ddptrain.distributed.launcher.process import gc_paused
from ddptrain.distributed.launcher.spinning import choose_spinning
from ddptrain.errors import ExitCode
from ddptrain.verbs.argv import HYDRA_OPTIONS
from ddptrain.verbs.composing import composed, expect_a_recipe, expect_no_sweep
from ddptrain.verbs.verb import Verb

HELP = """\
python -m ddptrain launch [torchrun's options] recipe=<name> [overrides]

torchrun, with the config checked before a rank starts, restarts that work, and exit codes that a scheduler
can read. The options are torchrun's own (torchrun --help shows all); those that matter:

  --nproc-per-node=<n>|gpu|cpu    ranks on this node; by default one for each GPU, or one where there is none
  --max-restarts=<n>              start the ranks again, from the newest checkpoint, after a crash (0)
  --shutdown-timeout=<seconds>    how long ranks have to save when asked to stop, before they are killed
                                  (30, or 5 more than checkpoint.grace)
  --nnodes=<n>|<min>:<max>        nodes (1). Several meet at an address, under a name for the job:
  --rdzv-backend=c10d --rdzv-endpoint=<host>:<port> --rdzv-id=<name>
  --rdzv-id=<name>                on one node too: started again under its name, a job finds its run folder

A config or an option that is wrong is refused before a rank starts. SIGTERM, SIGINT, SIGUSR1 and SIGHUP are
passed on to the ranks, which save and stop. Hydra's options (--config-dir, --cfg job) work as without launch.

  python -m ddptrain launch --nproc-per-node=4 --max-restarts=3 recipe=mobilenet_cifar10 optim.lr=0.01

Exit codes:
    0  done
    1  a crash, after all restarts
    2  the input is wrong (config, data, checkpoint, device): not restarted
    4  the loss or a gradient is not finite: not restarted
   75  stopped on request, with a checkpoint: not restarted; start the same command again
   76  a rank hung and was named, after all restarts
  128 + n  a rank was killed by signal n (137: SIGKILL, 143: SIGTERM), after all restarts"""
OF_TORCHRUN = {
    **dict.fromkeys(("--nnodes", "--nproc-per-node", "--node-rank", "--role", "--local-addr"), True),
    **dict.fromkeys(("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"), True),
    **dict.fromkeys(("--master-addr", "--master-port", "--max-restarts", "--monitor-interval"), True),
    **dict.fromkeys(("--log-dir", "-r", "--redirects", "-t", "--tee", "--local-ranks-filter"), True),
    **dict.fromkeys(("--signals-to-handle", "--numa-binding"), True),
    **dict.fromkeys(("--standalone", "--virtual-local-rank"), False),
}
"""torchrun's options that every torch from 2.11 on has, and whether each has a value: with these a command
line is understood before torch is imported. Each may be spelled with _ for its inner -, too."""
_LAUNCH_KNOWS = ("help", "module", "no_python", "run_path", "training_script", "print_completion")
"""torchrun's options that are not for ``launch``: it always starts ddptrain."""


def launch(arguments: Arguments) -> int:
    os.environ.pop("RANK", None)  # some schedulers' number of this node; each node's launch speaks for itself
    expect_a_recipe(arguments)
    expect_no_sweep(arguments)
    if (known := composed(arguments)) is None:
        return ExitCode.DONE
    config, _ = known
    if not os.environ.get("OMP_NUM_THREADS"):  # as torchrun does, but before what reads it is imported:
        os.environ["OMP_NUM_THREADS"] = "1"  # the ranks take their threads when they know how many they are
    choose_spinning()
    with gc_paused():
        from ddptrain.distributed.launcher.prefork import prefork_for
        from ddptrain.verbs.main import main

        parts = (config.task, config.data, config.model or {}, config.optim)
        targets = [str(part.get("_target_", "")) for part in parts]
        prefork = prefork_for(
            main, targets, config.compile != "off"
        )  # now, so that it imports its part while this does the rest
        from ddptrain.run import launch

    return launch.run(config, arguments.own_options, [*arguments.options, *arguments.overrides], prefork)


def torchrun_options(words: Sequence[str]) -> Mapping[str, bool]:
    """The options of torchrun that ``launch`` takes, and whether each has a value."""
    known = {name[:2] + name[2:].replace("-", "_"): takes for name, takes in OF_TORCHRUN.items()}
    known |= OF_TORCHRUN
    typed = {word.partition("=")[0] for word in words if word.startswith("-")}
    if typed <= known.keys() | HYDRA_OPTIONS:
        return known
    from torch.distributed.run import get_args_parser  # it knows all, and takes a second to import

    actions = [action for action in get_args_parser()._actions if action.dest not in _LAUNCH_KNOWS]
    return {name: action.nargs != 0 for action in actions for name in action.option_strings}


VERB = Verb(
    run=launch,
    summary="train on several ranks, with restarts and exit codes for a scheduler",
    help=HELP,
    composes=True,
    options=torchrun_options,
)
