"""World: which rank this process is, how many there are, and where they meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from npu_pipe.errors import ConfigError

__all__ = ["Launcher", "Sources", "World"]


class Launcher(Enum):
    """Who started this process."""

    ONE_PROCESS = "one process"
    LOCAL = "npu-pipe"
    TORCHRUN = "torchrun"
    TORCH_NPU_RUN = "torch_npu_run"
    MSRUN = "msrun"
    OPEN_MPI = "mpirun of Open MPI"
    MPICH = "mpiexec of MPICH"
    SLURM = "srun"
    BY_HAND = "variables set by hand"
    PROCESS_GROUP = "torch.distributed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where each value of a World comes from: the name of a variable, or a few words."""

    rank: str
    size: str
    local_rank: str
    address: str
    port: str


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The place of this process among the ranks of the job.

    rank, size: 0 <= rank < size. local_rank: index among the ranks of this machine.
    address, port: where the store of the job listens; port 0 if there is only one process, or
        if torch.distributed is initialised already, which has met at a store of its own.
    sources: where each of these was read; None for a World that was not read.
    local_size: how many ranks this machine has; None where the launcher does not tell.
    restarts: how many times the launcher has started the job anew.
    agent_store: the launcher itself serves the store, so rank 0 must not.
    listen_fd: a socket that listens on `port` already, for rank 0 of a local launch.
    members: where the ranks are a part of those of torch.distributed, which of them, ascending.
    report_fd, lifeline_fd: how a rank of a local launch tells its parent of an error, and how it
        learns that the parent is gone; see `npu_pipe.launch.guard`.

    Raises ConfigError when the numbers do not fit each other.
    """

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    launcher: Launcher
    sources: Sources | None = field(default=None, compare=False)
    local_size: int | None = None
    restarts: int = 0
    agent_store: bool = False
    listen_fd: int | None = None
    members: tuple[int, ...] | None = None
    report_fd: int | None = None
    lifeline_fd: int | None = None

    def __post_init__(self) -> None:
        # The ranks of a part may be any of those of the machine.
        most = self.size if self.members is None else self.local_rank + 1
        if not (0 <= self.rank < self.size and 0 <= self.local_rank < most):
            raise ConfigError(
                "ranks are numbered from 0 to size - 1",
                f"rank is {self.rank}, local rank {self.local_rank}, size {self.size}",
                "number the ranks from 0",
            )

    @property
    def place(self) -> str:
        """Where the store listens, as people write it."""
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"{address}:{self.port}"

    @classmethod
    def single(cls) -> World:
        """The world of one process, without a launcher."""
        return cls(
            rank=0,
            size=1,
            local_rank=0,
            address="127.0.0.1",
            port=0,
            launcher=Launcher.ONE_PROCESS,
        )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> World:
        """Read the launcher's variables from `environ`, or from the process's own environment.

        One process if no launcher has set any. Raises ConfigError, naming the variables, when
        they are incomplete, not numbers, out of range or contradict each other; SystemExit with
        status 0 in the process that msrun starts as MindSpore's scheduler, which is no rank.

        From here on the process whose own environment was read ends with its launcher: the model
        that a script builds next may take minutes. See `npu_pipe.launch.lifeline`.
        """
        # Imported here because every reader makes a World.
        from npu_pipe.launch.lifeline import end_with_launcher
        from npu_pipe.launch.readers.precedence import read_world
        from npu_pipe.launch.spawned import own_world

        if environ is not None:
            return read_world(environ)
        world = own_world(read_world(os.environ), os.environ)
        end_with_launcher(world)
        return world
