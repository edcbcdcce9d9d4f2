"""torch.distributed as its user has initialised it: the ranks, and how long they wait."""

from __future__ import annotations

import torch.distributed as dist

from npu_pipe.errors import ConfigError
from npu_pipe.launch.world import Launcher, World

__all__ = ["group_timeout_s", "world_of_group"]


def world_of_group(group: dist.ProcessGroup | None = None) -> World:
    """The ranks of `group`, or of the default group, in order; local_rank is not told.

    Raises ConfigError before torch.distributed is initialised, and for a group without this rank.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "stages are made by ranks that know each other",
            "torch.distributed is not initialised",
            "call torch.distributed.init_process_group first",
        )
    everybody = dist.distributed_c10d._get_default_group()
    ranks = _ranks(group or everybody)
    if everybody.rank() not in ranks or ranks != sorted(ranks):
        raise ConfigError(
            "a stage is made by a rank of its group, whose ranks ascend",
            f"rank {everybody.rank()} was given a group of {ranks or 'other ranks'}",
            "give each rank the group of its own pipeline",
        )
    return World(
        rank=ranks.index(everybody.rank()),
        size=len(ranks),
        local_rank=0,
        address=_meeting_place(everybody),
        port=0,
        launcher=Launcher.PROCESS_GROUP,
        members=tuple(ranks) if len(ranks) < everybody.size() else None,
    )


def group_timeout_s() -> float:
    """How long a rank may be late for the user's own collective calls: `timeout` of
    init_process_group."""
    everybody = dist.distributed_c10d._get_default_group()
    backend = everybody._get_backend(everybody._device_types[0])
    return float(backend.options._timeout.total_seconds())


def _ranks(group: dist.ProcessGroup) -> list[int]:
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:  # new_group gives no group to ranks outside it
        return []


def _meeting_place(everybody: dist.ProcessGroup) -> str:
    """The host of the store at which the ranks met; a store without one is on this machine."""
    store = everybody.get_group_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else "127.0.0.1"
