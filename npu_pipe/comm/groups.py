"""The process groups of a pipeline: one a lane, and one for control.

They are made in one fixed order on every rank. Gloo connects all pairs when a group is made,
so nothing is set up lazily later, while ranks are busy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from npu_pipe.comm.failure import peer_failures
from npu_pipe.errors import ConfigError
from npu_pipe.ir.program import Lane

__all__ = ["Groups", "close_groups", "open_groups"]


@dataclass(frozen=True, slots=True)
class Groups:
    """Their ranks are numbered as those of the pipeline."""

    control: dist.ProcessGroup
    lanes: Mapping[Lane, dist.ProcessGroup]


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


def close_groups(groups: Groups) -> None:
    """Leave the groups, without waiting for other ranks."""
    if dist.is_initialized():  # not so if its user has shut it down already
        for group in (*groups.lanes.values(), groups.control):
            dist.destroy_process_group(group)
