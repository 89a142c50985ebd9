"""The verb ``launch``: torchrun, with the config checked before a rank starts, restarts that work, and exit
codes that a scheduler can read."""

import logging
import math
import os
import signal
import sys
import uuid
from argparse import ArgumentError, Namespace
from collections.abc import Sequence

import torch
from torch.distributed import run as torchrun
from torch.distributed.launcher.api import LaunchConfig

from ddptrain.config.schema import Config
from ddptrain.distributed.launcher.agent import run_ranks, say
from ddptrain.distributed.launcher.prefork import Prefork
from ddptrain.distributed.launcher.process import AGENT
from ddptrain.errors import ExitCode, UserError
from ddptrain.run.optimizer import check_optimizer
from ddptrain.run.schedule import check_schedule
from ddptrain.run.setup import check_extensions, make_task
from ddptrain.text import counted
from ddptrain.torch_private import spare_dynamo

_SHUTDOWN, _SHUTDOWN_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30
"""torchrun's variable for the seconds that ranks have to save when asked to stop, and its default."""
_MARGIN_S = 5
"""Beyond checkpoint.grace, after which a rank ends by itself."""


def run(config: Config, options: Sequence[str], words: Sequence[str], prefork: Prefork | None) -> int:
    """Start the ranks of this node and wait for their end; returns the exit code.

    ``options`` are torchrun's, ``words`` the command line of the ranks, which the prefork forks, if there is
    one and no option needs a separate program for each. Raises UserError for what a rank
    would refuse before it opens its data, and for options that torchrun refuses.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError("launch: starts the ranks itself; start it with python, not with torchrun.")
    if "LOGLEVEL" not in os.environ:  # the ranks' own messages say it, and `say` says which rank it was
        logging.disable(logging.ERROR)
    args, why = _parsed(options, words, config.device)
    if getattr(args, "shutdown_timeout", 0) is None and _SHUTDOWN not in os.environ:  # torch 2.11 has none
        args.shutdown_timeout = max(_SHUTDOWN_S, math.ceil(config.checkpoint.grace) + _MARGIN_S)
    _meet(args)
    agent, command, rank_words = _launch_config(args)
    may_restart = agent.max_restarts or agent.min_nodes < agent.max_nodes
    if config.run.resume == "never" and agent.max_nodes > 1 and may_restart:
        raise UserError(
            "run.resume=never: a node that joins or begins again can't know that the run has begun, and would"
            " put it aside. On several nodes that may restart, name a new run.dir instead."
        )
    spare_dynamo()
    make_task(config)
    check_extensions(config)
    check_optimizer(config.optim)
    check_schedule(config.sched)
    if agent.max_nodes > 1:
        # or torchrun keeps one store over restarts, with the addresses of dead ranks; on one node
        # `open_group` steps round them, and the store's port is then never free for others to take
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if command == sys.executable:  # PYTHON_EXEC may be a script, and then the ranks' parent
        os.environ[AGENT] = str(os.getpid())
    here = "" if agent.max_nodes == 1 else " on this node"
    ranks = counted(agent.nproc_per_node, "rank")
    say(f"{ranks}{here}{why}, max restarts {agent.max_restarts}, run id {agent.run_id}")
    if prefork is not None and agent.numa_options is not None:  # numactl starts programs
        prefork.close()
        prefork = None
    ended = run_ranks(agent, command, rank_words, config.hang_timeout, prefork)
    if ended.exit_code not in (ExitCode.DONE, ExitCode.USER_ERROR):  # the last word is the rank's
        used = f"{ended.restarts} of {agent.max_restarts} restarts used"
        say(f"{ended.how}; {used}; exit code {ended.exit_code}")
    return ended.exit_code


def _parsed(options: Sequence[str], words: Sequence[str], device: str) -> tuple[Namespace, str]:
    """torchrun's arguments, and the reason for the number of ranks where none was given."""
    parser = torchrun.get_args_parser()
    parser.exit_on_error = False
    if "PET_NPROC_PER_NODE" not in os.environ:
        parser.set_defaults(nproc_per_node=None)
    try:
        args = parser.parse_args([*options, "--module", "ddptrain", *words])
    except ArgumentError as error:
        name = (error.argument_name or "launch").partition("/")[0]
        raise UserError(f"{name}: {error.message}.") from error
    if args.nproc_per_node is not None:
        return args, ""
    if device.startswith("cuda:"):  # a second one would only take turns with the first
        args.nproc_per_node, why = "1", f"device={device} is one GPU"
    elif device != "cpu" and torch.cuda.is_available():
        args.nproc_per_node, why = "gpu", "one for each GPU"
    else:
        args.nproc_per_node, why = "1", "no GPU in use; for more: --nproc-per-node=<number>"
    return args, f" ({why})"


def _meet(args: Namespace) -> None:
    """Settle where the nodes meet and the job's id, by which all its restarts find one run folder."""
    try:
        fewest, most = torchrun.parse_min_max_nnodes(args.nnodes)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"--nnodes={args.nnodes}: must be a number, or <min>:<max>.") from error
    static = args.rdzv_backend == "static"
    where = "--rdzv-backend=c10d --rdzv-endpoint=<host>:<port> --rdzv-id=<job>"
    if args.standalone and most > 1:
        raise UserError(f"--standalone: is for one node; for --nnodes={args.nnodes} give {where}.")
    if most > 1 and static and (args.max_restarts or fewest != most):
        raise UserError(
            "--rdzv-backend=static: on several nodes it keeps the addresses of dead ranks, so that restarts"
            f" may hang, and the number of nodes is fixed. Give {where}."
        )
    if most > 1 and not static and args.rdzv_id == "none":
        raise UserError("--rdzv-id: give the job a name, the same on all nodes: --rdzv-id=$SLURM_JOB_ID")
    rank_tells_host = "PET_NODE_RANK" in os.environ and "is_host" not in args.rdzv_conf
    if most > 1 and args.rdzv_backend == "c10d" and rank_tells_host:
        # else torch asks for the endpoint's name once, and a cluster's DNS may not have it yet
        is_host = f"is_host={str(args.node_rank == 0).lower()}"
        args.rdzv_conf = ",".join(filter(None, (args.rdzv_conf, is_host)))
    if args.standalone or (most == 1 and static and not args.rdzv_endpoint):
        args.rdzv_backend, args.rdzv_endpoint = "c10d", "localhost:0"
        # the host's own name may be one that nobody resolves
        args.local_addr = args.local_addr or "localhost"
    if args.rdzv_id == "none":
        args.rdzv_id = uuid.uuid4().hex[:10]
    if args.master_port is None:
        args.master_port = 29500


def _launch_config(args: Namespace) -> tuple[LaunchConfig, str, list[str]]:
    """What torchrun makes of its arguments. Raises UserError where it refuses them."""
    if "SIGUSR1" not in args.signals_to_handle:
        args.signals_to_handle += ",SIGUSR1"
    names = args.signals_to_handle.replace(" ", "").split(",")
    for name in names:
        if name not in signal.Signals.__members__:
            raise UserError(f"--signals-to-handle: {name} is no signal of this system.")
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # of nohup: the terminal may be closed
        names = [name for name in names if name != "SIGHUP"]
    args.signals_to_handle = ",".join(names)
    try:
        config, command, words = torchrun.config_from_args(args)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise UserError(f"launch: {str(error).rstrip('.')}.") from error
    if config.nproc_per_node < 1:
        raise UserError(f"--nproc-per-node={args.nproc_per_node}: must be at least 1.")
    assert isinstance(command, str)
    return config, command, words
