"""torchrun's agent on this node, which reads exit codes: what a restart can't mend, and how a job ended."""

import inspect
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.launcher import api

from ddptrain.distributed.launcher.prefork import Prefork
from ddptrain.distributed.launcher.rendezvous import LAST_WORD_S, Rendezvous, end_if_cut_off
from ddptrain.errors import ExitCode, UserError
from ddptrain.text import counted

_monitor_workers = inspect.unwrap(LocalElasticAgent._monitor_workers)
"""Without torch's timing of it: a signal that comes as that begins it hides behind an UnboundLocalError (seen
with torch 2.14.1), and a job that was asked to stop would end as one that failed."""
NOT_MENDED = (ExitCode.USER_ERROR, ExitCode.DIVERGED, ExitCode.STOPPED)
"""With these a restart would end in the same way, or against what was asked for."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The rank that ended a job, and how; a signal is a negative code, as in subprocess."""

    rank: int
    code: int
    error: str = ""
    """The first line of its exception's message, where it wrote one down."""

    @property
    def exit_code(self) -> int:
        return 128 - self.code if self.code < 0 else self.code

    def __str__(self) -> str:
        rank = f"rank {self.rank} on {socket.gethostname()}"
        if self.code < 0:
            names = {known.value: known.name for known in signal.Signals}
            return f"{rank} was killed by {names.get(-self.code, f'signal {-self.code}')}"
        if self.code == ExitCode.STOPPED:
            return f"{rank} stopped on request"
        return f"{rank} ended with exit code {self.code}{f' ({self.error})' if self.error else ''}"


@dataclass(frozen=True, slots=True)
class NodeResult:
    """How the ranks of this node ended."""

    exit_code: int
    how: str = ""
    restarts: int = 0


def run_ranks(
    config: api.LaunchConfig,
    command: str,
    words: list[str],
    hang_timeout: float | None = None,
    prefork: Prefork | None = None,
) -> NodeResult:
    """Start the ranks of this node and wait for their end, with restarts; forwards signals to them.

    hang_timeout: seconds; so long, and `LAST_WORD_S` more, this node may be out of reach of the others (None:
    for ever). prefork: forks the ranks, in place of ``command -u -m ddptrain``. Raises UserError where
    torchrun refuses the config.
    """
    agents: list[_Agent] = []
    watched = hang_timeout is not None and config.max_nodes > 1 and config.rdzv_backend == "c10d"
    patience = (hang_timeout or 0.0) + LAST_WORD_S if watched else None
    # launch_agent makes its agent by this name and takes none; without it we would copy its 100 lines
    vars(api)["LocalElasticAgent"] = partial(_Agent, agents, config.rdzv_endpoint, patience)
    program = (command, "-u", "-m", "ddptrain")
    try:
        with prefork.starting(program) if prefork is not None else nullcontext():
            api.launch_agent(config, command, words)
        return _node_result(agents[0])
    except ChildFailedError:
        return _node_result(agents[0], agents[0].cause)
    except SignalException as stop:
        return _result_after_signal(agents[0], stop.sigval)
    except RendezvousError as error:
        return _not_met(agents, config.rdzv_endpoint, error)
    except ValueError as error:
        if agents:
            raise
        raise UserError(f"launch: {str(error).rstrip('.')}.") from error
    finally:
        vars(api)["LocalElasticAgent"] = LocalElasticAgent
        for name in config.signals_to_handle.split(","):  # their handlers would raise in what is left to do
            signal.signal(getattr(signal, name), signal.SIG_IGN)


class _Agent(LocalElasticAgent):
    """Spends no restart where none helps, or where a host has come or gone; remembers which rank ended an
    attempt first."""

    def __init__(
        self, agents: "list[_Agent]", endpoint: str, patience: float | None, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        agents.append(self)
        self.cause: Cause | None = None
        self.restarts = 0
        self.is_meeting = False
        """Waits for other hosts; the ranks that it knows of are those of the attempt before."""
        self._host_rendezvous = Rendezvous(arguments["spec"].rdzv_handler)
        if patience is not None:
            end_if_cut_off(endpoint, patience, self._kill_ranks)

    def run(self, role: str = "default") -> RunResult:
        result: RunResult | None = super().run(role)
        if result is None:  # so torchrun ends where it has not been needed
            raise RendezvousClosedError
        return result

    def codes(self) -> dict[int, int]:
        """The exit codes of this node's ranks that have ended, by rank."""
        ranks = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        return {
            ranks[local]: code
            for local, process in self._processes().items()
            if (code := process.poll()) is not None
        }

    def any_runs(self) -> bool:
        return any(process.poll() is None for process in self._processes().values())

    def _processes(self) -> dict[int, Any]:
        """Of this node's ranks, by local rank; none before they are started."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {local: handler.proc for local, handler in handlers.items()}

    def cause_now(self) -> Cause | None:
        """The most telling of its ranks' ends, as they are now; None where none has failed."""
        failed = {rank: code for rank, code in self.codes().items() if code}
        return cause_of(failed, {}) if failed else None

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        # torch's own kills them after 30 s, whatever --shutdown-timeout says; torch 2.11 has no such option
        self._shutdown(timeout=getattr(self, "_shutdown_timeout", 30))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # as they are before the other ranks are ended, too
        first = {rank: code for rank, code in self.codes().items() if code}
        if first:
            self._stop_workers(worker_group)  # where torch finds them running, it gives them 30 s
        try:
            result: RunResult = _monitor_workers(self, worker_group)
        except ValueError:  # a rank was killed while it wrote its exception down, and torchrun reads that
            self._drop_half_written()
            result = _monitor_workers(self, worker_group)
        if not result.is_failed():
            self._host_rendezvous.look()
            return result
        first = first or {rank: failure.exitcode for rank, failure in result.failures.items()}
        self.cause = cause_of(first, result.failures)
        if change := self._change_of_hosts(self.cause):
            say(f"{change}: going on with the hosts that are there")
            self._restart_workers(worker_group)
            return RunResult(WorkerState.HEALTHY)
        if self.cause.code in NOT_MENDED:
            self._remaining_restarts = 0  # as torchrun itself does where no restart can help
        elif self._remaining_restarts:
            self.restarts += 1
            say(f"{self.cause}: restart {self.restarts} of {worker_group.spec.max_restarts}")
        return result

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.is_meeting = True
        super()._rendezvous(worker_group)
        self.is_meeting, self.cause = False, None
        hosts = self._host_rendezvous.met()
        if self._host_rendezvous.elastic:
            ranks = counted(worker_group.workers[0].world_size, "rank")
            say(f"{counted(len(hosts), 'host')} ({', '.join(hosts)}) with {ranks} in all")

    def _change_of_hosts(self, cause: Cause) -> str:
        """Which, where one has ended the ranks; '' where they ended by themselves.

        To take in a host, another agent stops its ranks, and by their flags these here too.
        """
        if not self._host_rendezvous.elastic or cause.code in (ExitCode.USER_ERROR, ExitCode.DIVERGED):
            return ""
        if cause.code != ExitCode.STOPPED and (lost := self._host_rendezvous.lost()):
            return f"lost {' and '.join(lost)}"
        return "the hosts meet again" if self._host_rendezvous.others_wait() else ""

    def _kill_ranks(self) -> None:
        for process in self._processes().values():
            process.kill()

    def _drop_half_written(self) -> None:
        for path in getattr(self._pcontext, "error_files", {}).values():
            try:
                with suppress(FileNotFoundError):
                    json.loads(Path(path).read_text())
            except ValueError:
                os.unlink(path)


def say(line: str) -> None:
    """Print a line of the launcher's own."""
    print(f"ddptrain launch: {line}", file=sys.stderr, flush=True)


def cause_of(codes: Mapping[int, int], failures: Mapping[int, ProcessFailure]) -> Cause:
    """The most telling of several ranks' ends: who loses a peer fails too, and may be gone before it.

    codes: of those that ended by themselves.
    """
    # a rank that does not answer is killed by the one that reports it, and may end before that one
    hung = {rank: failure.exitcode for rank, failure in failures.items() if failure.exitcode == ExitCode.HUNG}
    codes = {**codes, **hung}
    rank = min(codes, key=lambda rank: (_severity(codes[rank]), rank))
    crashed = [rank for rank, failure in failures.items() if isinstance(failure.message, dict)]
    if _severity(codes[rank]) < _severity(ExitCode.CRASH) or not crashed:
        return Cause(rank, codes[rank])
    # a rank that wrote an exception down has crashed, whatever signal it then died of
    rank = min(crashed, key=lambda rank: os.stat(failures[rank].error_file).st_mtime)
    message: Any = failures[rank].message
    return Cause(rank, ExitCode.CRASH, message.get("message", "").strip().partition("\n")[0])


def _severity(code: int) -> int:
    if code in (*NOT_MENDED, ExitCode.HUNG):
        return 0
    if code in (-signal.SIGTERM, -signal.SIGABRT):
        return 3  # sent by torchrun; by gloo when a peer is gone
    return 1 if code < 0 else 2


def _node_result(agent: _Agent, cause: Cause | None = None) -> NodeResult:
    cause = cause or agent.cause_now()
    if cause is None:
        return NodeResult(ExitCode.DONE)
    return NodeResult(cause.exit_code, str(cause), agent.restarts)


def _result_after_signal(agent: _Agent, by: signal.Signals) -> NodeResult:
    """After a signal to this launch, when torchrun has passed it on and waited for the ranks."""
    codes = agent.codes()
    saved = [rank for rank, code in codes.items() if code == ExitCode.STOPPED]
    if saved:
        return _node_result(agent, Cause(saved[0], ExitCode.STOPPED))
    if agent.any_runs():
        return NodeResult(128 + by, f"stopped by {by.name} at once, while ranks were saving", agent.restarts)
    if not codes or agent.is_meeting:
        return NodeResult(128 + by, f"stopped by {by.name} while no rank ran", agent.restarts)
    return _node_result(agent)


def _not_met(agents: list[_Agent], where: str, error: RendezvousError) -> NodeResult:
    """The nodes did not meet, or no longer: the job is over elsewhere, or where they meet is gone."""
    agent = agents[0] if agents else None
    if agent is None or not agent.codes():
        why = str(error.__cause__ or error).partition("\n")[0] or type(error).__name__
        why = "that job is over" if isinstance(error, RendezvousClosedError) else why
        return NodeResult(ExitCode.CRASH, f"the nodes did not meet at {where} ({why})")
    # torchrun has ended the ranks here: what they ended with by themselves says more
    cause = agent.cause or agent.cause_now()
    if cause is None or cause.code in (-signal.SIGTERM, -signal.SIGKILL):
        cause = Cause(min(agent.codes()), ExitCode.CRASH)
    over = f"the rendezvous at {where} is gone: the job has ended there, or that host has"
    if isinstance(error, RendezvousClosedError):
        over = "the job is over on another node"
    if isinstance(error, RendezvousTimeoutError):
        over = f"too few nodes have met again at {where}"
    return NodeResult(cause.exit_code, f"{cause}, and {over}", agent.restarts)
