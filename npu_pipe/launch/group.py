"""torch.distributed of all ranks of a job, and what they do together before a Pipeline is made."""

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
from npu_pipe.launch.world import World

__all__ = ["join", "most_restarts", "open_replicas"]


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
    most = torch.tensor(world.restarts, device="cpu")
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
