"""The process groups of a pipeline: one a lane, and one for control.

They are made in one fixed order on every rank. Gloo connects all pairs when a group is made,
so nothing is set up lazily later, while ranks are busy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from npu_pipe.comm.failure import peer_failures
from npu_pipe.ir.program import Lane

__all__ = ["Groups", "close_groups", "open_groups"]


@dataclass(frozen=True, slots=True)
class Groups:
    """owns_default: whether torch.distributed was initialised here, and is to be shut down."""

    control: dist.ProcessGroup
    lanes: Mapping[Lane, dist.ProcessGroup]
    owns_default: bool


def open_groups(store: dist.Store, rank: int, size: int, *, timeout_s: float) -> Groups:
    """Connect all ranks; raises PeerError when one does not come within `timeout_s`.

    Where torch.distributed is initialised already, its ranks have to be those of the pipeline.
    """
    timeout = timedelta(seconds=timeout_s)
    with peer_failures(f"rank {rank} was connecting to {size} ranks"):
        owns_default = not dist.is_initialized()
        if owns_default:
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=timeout
            )
        control, down, up = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(3))
    return Groups(control, {Lane.DOWN: down, Lane.UP: up}, owns_default)


def close_groups(groups: Groups) -> None:
    """Leave the groups, without waiting for other ranks."""
    for group in (*groups.lanes.values(), groups.control):
        dist.destroy_process_group(group)
    if groups.owns_default:
        dist.destroy_process_group()
