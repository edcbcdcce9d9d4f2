"""The World of a torch.distributed that its user has initialised."""

from __future__ import annotations

import torch.distributed as dist

from npu_pipe.errors import ConfigError
from npu_pipe.launch.world import Launcher, World

__all__ = ["world_of_group"]


def world_of_group(group: dist.ProcessGroup | None = None) -> World:
    """The ranks of the default group, of which `group` must have all, in order.

    Raises ConfigError before torch.distributed is initialised, and for a part of the ranks.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "stages are made by ranks that know each other",
            "torch.distributed is not initialised",
            "call torch.distributed.init_process_group first",
        )
    everybody = dist.distributed_c10d._get_default_group()
    size = everybody.size()
    ranks = dist.get_process_group_ranks(group or everybody)
    if ranks != list(range(size)):
        raise ConfigError(
            "a pipeline has all ranks of torch.distributed, in order",
            f"the group has ranks {', '.join(map(str, ranks))} of {size}",
            "leave group out, and start one job for each pipeline",
        )
    return World(
        rank=everybody.rank(),
        size=size,
        local_rank=dist.get_node_local_rank(fallback_rank=0),
        address=_meeting_place(everybody),
        port=0,
        launcher=Launcher.PROCESS_GROUP,
    )


def _meeting_place(everybody: dist.ProcessGroup) -> str:
    """The host of the store at which the ranks met; a store without one is on this machine."""
    store = everybody.get_group_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else "127.0.0.1"
