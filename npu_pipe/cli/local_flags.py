"""The flags of the verbs that start ranks on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from npu_pipe.cli.common import Count, Output
from npu_pipe.errors import ConfigError
from npu_pipe.launch.cores import read_cores, share_cores
from npu_pipe.launch.local import LocalJob

__all__ = ["LocalFlags"]

_MOST_RESTARTS = 1000


@dataclass(frozen=True, slots=True)
class LocalFlags:
    """How ranks are started on this machine; a launcher from outside has ways of its own."""

    port: Count = None
    """Where the ranks of this machine meet; a free port if left out."""
    max_restarts: int = 0
    """How often to start all ranks anew after one has failed; training then goes on from its
    last checkpoint by itself."""
    log_dir: Output = None
    """Folder for what each rank prints, rank0.log and so on."""
    unbound: bool = False
    """Let ranks run on all cores; else each has its own, of one NUMA node, where there are two or
    more for each."""

    def job(self, ranks: int, *, prefixed: bool = False, serves_itself: bool = False) -> LocalJob:
        """Raises ConfigError for a number that makes no sense."""
        if not 0 <= self.max_restarts <= _MOST_RESTARTS:
            raise ConfigError(
                f"max-restarts is from 0 to {_MOST_RESTARTS}",
                f"it is {self.max_restarts}",
                "give how often all ranks may be started anew, 0 for never",
            )
        return LocalJob(
            port=self.port,
            serves_itself=serves_itself,
            log_dir=self.log_dir,
            prefixed=prefixed,
            cores=() if self.unbound or ranks < 1 else share_cores(read_cores(), ranks),
            max_restarts=self.max_restarts,
        )
