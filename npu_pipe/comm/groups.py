"""The process groups of a pipeline: one a lane, and one for control.

They are made in one fixed order on every rank. Gloo connects all pairs when a group is made,
so nothing is set up lazily later, while ranks are busy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta

import torch.distributed as dist

from npu_pipe.comm.failure import peer_failures
from npu_pipe.errors import ConfigError, RunError
from npu_pipe.ir.program import Lane

__all__ = ["Groups", "open_groups"]


class Groups:
    """The one owner of a pipeline's groups: whoever uses them asks here each time.

    A gloo connection closes when its last owner lets go of it, and that is how the other ranks
    notice that this one has left: see `close`.
    """

    def __init__(self, control: dist.ProcessGroup, lanes: Mapping[Lane, dist.ProcessGroup]) -> None:
        self.rank = control.rank()
        self.size = control.size()
        self._control: dist.ProcessGroup | None = control
        self._lanes = dict(lanes)

    @property
    def is_open(self) -> bool:
        return self._control is not None

    @property
    def control(self) -> dist.ProcessGroup:
        if self._control is None:
            raise _closed()
        return self._control

    def lane(self, lane: Lane) -> dist.ProcessGroup:
        if lane not in self._lanes:
            raise _closed()
        return self._lanes[lane]

    def close(self) -> None:
        """Leave, without waiting for other ranks."""
        groups = [*self._lanes.values(), *([self._control] if self._control else [])]
        self._lanes.clear()
        self._control = None
        while groups:
            if dist.is_initialized():  # not so if its user has shut it down already
                dist.destroy_process_group(groups.pop())


def open_groups(
    rank: int, size: int, *, open_store: Callable[[], dist.Store], timeout_s: float
) -> Groups:
    """Connect all ranks; raises PeerError when one does not come within `timeout_s`.

    The first pipeline of a process initialises torch.distributed, unless its user has, and
    leaves it so: the store at which the ranks met is served by rank 0, and can be served only
    once. Raises ConfigError where it is initialised with other ranks.
    """
    timeout = timedelta(seconds=timeout_s)
    with peer_failures(f"rank {rank} was connecting to {size} ranks"):
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo", store=open_store(), rank=rank, world_size=size, timeout=timeout
            )
        elif (dist.get_rank(), dist.get_world_size()) != (rank, size):
            raise ConfigError(
                "the pipeline has the ranks of torch.distributed",
                f"this is rank {rank} of {size}, and was initialised as rank {dist.get_rank()} of "
                f"{dist.get_world_size()}",
                "take the world from the same environment",
            )
        control, down, up = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(3))
    return Groups(control, {Lane.DOWN: down, Lane.UP: up})


def _closed() -> RunError:
    return RunError(
        "a pipeline is not used after it failed or was closed",
        "one of its transfers was asked for",
        "make a new one",
    )
