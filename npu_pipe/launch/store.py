"""The key-value store at which the ranks of a job meet."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from npu_pipe.errors import PeerError
from npu_pipe.launch.world import Launcher, World

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["open_store"]


def open_store(world: World, *, timeout_s: float) -> Store:
    """Open the store of the job; returns when all ranks have come.

    One process keeps it in memory. A local launch serves it in rank 0 on the socket that the
    parent has bound. Under torchrun the agent serves it if it says so, else rank 0 does; that is
    what torch's own `env://` rendezvous does. Keys of an earlier start of the job are out of
    sight. Called once a process. Raises PeerError if the ranks do not meet within `timeout_s`.
    """
    import torch.distributed as dist

    from npu_pipe.comm.meeting import meet_at

    if world.launcher is Launcher.ONE_PROCESS:
        return dist.HashStore()
    serves = world.rank == 0 and not world.agent_store
    place = f"{world.address}:{world.port}"
    if world.listen_fd is not None:
        # A process that this rank starts must not keep the port after it.
        os.set_inheritable(world.listen_fd, False)
    try:
        store = dist.TCPStore(
            world.address,
            world.port,
            world.size,
            serves,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=world.listen_fd is None,
            master_listen_fd=world.listen_fd,
        )
    except dist.DistError as error:
        raise PeerError(
            f"all {world.size} ranks meet at {place} within {timeout_s:g} s",
            f"rank {world.rank} found no store there ({str(error).splitlines()[0]})",
            "look for a rank 0 that did not start, or a firewall between the machines",
        ) from error
    ours = dist.PrefixStore(f"npu_pipe/{world.restarts}", store)
    meet_at(ours, world.rank, world.size, place=place, connect_s=timeout_s)
    return ours
