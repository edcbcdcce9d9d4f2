"""torch.distributed of all ranks of a job: initialised here, or by its user."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from npu_pipe.comm.data_parallel import DataParallel, OneReplica, Replicas
from npu_pipe.comm.failure import peer_failures
from npu_pipe.device.device import Device
from npu_pipe.errors import ConfigError
from npu_pipe.launch.mesh import Axis, Mesh
from npu_pipe.launch.store import open_store
from npu_pipe.launch.world import Launcher, World

__all__ = ["group_timeout_s", "join", "most_restarts", "open_replicas", "world_of_group"]


def join(world: World, *, connect_s: float = 60) -> None:
    """Initialise torch.distributed with all ranks of the job, unless that has been done.

    What comes before a Pipeline of some of them; one of all ranks does so itself. Raises
    PeerError if a rank does not come within `connect_s`, ConfigError where torch.distributed has
    other ranks.
    """
    if not dist.is_initialized():
        with peer_failures(f"rank {world.rank} was connecting to {world.size} ranks"):
            dist.init_process_group(
                "gloo",
                store=open_store(world, timeout_s=connect_s),
                rank=world.rank,
                world_size=world.size,
                timeout=timedelta(seconds=connect_s),
            )
    elif (dist.get_rank(), dist.get_world_size()) != (world.rank, world.size):
        raise ConfigError(
            "a job has the ranks of torch.distributed",
            f"this is rank {world.rank} of {world.size}, and was initialised as rank "
            f"{dist.get_rank()} of {dist.get_world_size()}",
            "take the world from the same environment",
        )


def most_restarts(world: World) -> int:
    """How often the job has been started anew, as the rank says that knows of most; collective
    among all that have joined.

    An agent of torchrun counts only the failures of its own node.
    """
    most = torch.tensor(world.restarts)
    with peer_failures(f"rank {world.rank} was meeting the other ranks"):
        dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def open_replicas(
    mesh: Mesh,
    world: World,
    stages: Mapping[int, nn.Module],
    *,
    device: Device,
    connect_s: float = 60,
) -> Replicas:
    """The replicas of this rank's stages; before the Pipeline is made. See
    `npu_pipe.comm.data_parallel`.

    stages: the modules of this rank. Raises what `join` and `DataParallel` raise.
    """
    mesh.check_world(world)
    if mesh.size > mesh.pp:
        join(world, connect_s=connect_s)
    if mesh.dp == 1:
        return OneReplica()
    return DataParallel(
        stages,
        index=mesh.coordinates(world.rank).dp,
        members=mesh.ranks(Axis.DP, world.rank),
        address=world.address,
        device=device,
        connect_s=connect_s,
    )


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
