"""Run a job's ranks on this machine, and leave nothing behind.

parent --- listening socket ---> rank 0      no race for a free port; see LocalJob.serves_itself
   |  <--- report file --------- each rank   the first error is shown once
   |  ---- lifeline pipe ------> each rank   its end of file means that the parent is gone
"""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from npu_pipe.errors import ConfigError
from npu_pipe.launch.cores import bound_to
from npu_pipe.launch.failure import Failure
from npu_pipe.launch.kept import Lifeline, lifeline
from npu_pipe.launch.local_ranks import LocalRanks
from npu_pipe.launch.process import RankProcess
from npu_pipe.launch.say import say
from npu_pipe.launch.signals import caught_signals
from npu_pipe.launch.world import Launcher, World

__all__ = ["LocalJob", "run_local"]

_ADDRESS = "127.0.0.1"
_MOST_RANKS = 1024  # a number that is larger was not meant
_USAGE = 2  # the status of a user's mistake


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalJob:
    """How the ranks of this machine are run.

    port: where they meet; None for a free one. log_dir: where the output of rank r is appended to
    rank{r}.log; without one it is held back.
    serves_itself: rank 0 opens the port itself, as torch's own env:// does; until then it is kept
    from others. Else it is given a socket that listens already, which npu_pipe takes.
    prefixed: print what all ranks write, with the rank before each line; else rank 0 shares the
    terminal of this process, and no other rank is shown or rank 0 logged.
    cores: the hardware threads of each rank; empty where nobody is bound.
    max_restarts: how often all ranks are started anew after one of them has failed.
    """

    port: int | None = None
    serves_itself: bool = False
    log_dir: Path | None = None
    prefixed: bool = False
    cores: Sequence[Collection[int]] = ()
    max_restarts: int = 0


_PLAIN = LocalJob()


def run_local(
    command: Sequence[str],
    *,
    ranks: int,
    job: LocalJob = _PLAIN,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Run `command` once a rank, on loopback; returns the exit status of the job.

    The status is 0 if all ranks end with 0; that of the first rank to fail, whose error is
    printed; 128 + its number after a signal. Then no rank is left, nor any process that one has
    started. A failure with status 2, a user's mistake, would come again, so nothing is started
    anew after it. environ: this process's own by default.

    To be called in the main thread, while no other one starts a process: it would be taken for one
    that a rank has left behind, and ended. Raises ConfigError, and leaves nothing running, for
    ranks < 1 or > 1024, a port that is in use or not allowed, a command that cannot be run or a
    log that cannot be written.
    """
    if ranks < 1:
        raise ConfigError("a job has at least 1 rank", f"{ranks} asked for", "ask for 1 or more")
    if ranks > _MOST_RANKS:
        raise ConfigError(
            f"one machine runs at most {_MOST_RANKS} ranks",
            f"{ranks} asked for",
            "ask for as many as it has devices, or cores",
        )
    environ = os.environ if environ is None else environ
    with lifeline() as line, caught_signals() as caught:
        for restarts in range(job.max_restarts + 1):
            failure = _run_once(
                command, ranks, job, line, environ=environ, restarts=restarts, caught=caught
            )
            if failure is None:
                break
            if caught or failure.status == _USAGE or restarts == job.max_restarts:
                return failure.status
            say(f"npu-pipe: all ranks are started anew, time {restarts + 1}")
    if caught:
        say(f"npu-pipe: ended by {caught[0].name}")
        return 128 + caught[0]
    return 0


def _run_once(
    command: Sequence[str],
    ranks: int,
    job: LocalJob,
    line: Lifeline,
    *,
    environ: Mapping[str, str],
    restarts: int,
    caught: Sequence[signal.Signals],
) -> Failure | None:
    """Run all ranks to their end; the failure of the first, which has been printed."""
    stopped: list[int] = []
    with _bind(job.port) as listener:
        if not job.serves_itself:
            listener.listen()
        team = LocalRanks(caught)
        try:
            for rank in range(ranks):
                if caught:
                    break
                world = World(
                    rank=rank,
                    size=ranks,
                    local_rank=rank,
                    address=_ADDRESS,
                    port=listener.getsockname()[1],
                    launcher=Launcher.LOCAL,
                    restarts=restarts,
                    listen_fd=None if rank or job.serves_itself else listener.fileno(),
                    lifeline_fd=line.fd,
                )
                with bound_to(job.cores[rank] if job.cores else ()):
                    team.add(
                        RankProcess(
                            command,
                            world,
                            environ={**environ, **line.environ},
                            log=job.log_dir and job.log_dir / f"rank{rank}.log",
                            on_terminal=rank == 0 and not job.prefixed,
                            is_shown=job.prefixed,
                        )
                    )
            if not job.serves_itself:
                # From here on the port is rank 0's: when it dies, its peers see the port closed.
                listener.close()
            failure = team.watch(is_shown=job.prefixed)
            if failure is not None:
                stopped = team.stopped()
        finally:
            team.end()
    if failure is not None:
        say(f"rank {failure.rank}: {failure.text}")
    if stopped:
        ranks_stopped = ", ".join(map(str, stopped))
        say(f"npu-pipe: stopped by a signal or a debugger: rank {ranks_stopped}")
    return failure


@contextmanager
def _bind(port: int | None) -> Iterator[socket.socket]:
    """A socket at a port that nobody listens at. Who sets SO_REUSEADDR too, as torch does, may
    bind it as well; the kernel gives it to nobody else."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((_ADDRESS, port or 0))
        except (OSError, OverflowError) as error:
            used = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            raise ConfigError(
                "the port asked for is free",
                f"port in use: {port}" if used else f"port {port}: {error}",
                "ask for another port, or for none to get a free one",
            ) from error
        yield listener
