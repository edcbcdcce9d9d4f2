"""The key-value store at which the ranks of a job meet."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from npu_pipe.errors import ConfigError, NpuPipeError, PeerError
from npu_pipe.launch.lifeline import end_with_launcher
from npu_pipe.launch.reach import why_unreachable
from npu_pipe.launch.world import Launcher, World

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["open_store"]


def open_store(world: World, *, timeout_s: float) -> Store:
    """Open the store of the job; returns when all ranks have come.

    One process keeps it in memory. A local launch serves it in rank 0 on the socket that the
    parent has bound. Under torchrun the agent serves it if it says so, else rank 0 does; that is
    what torch's own `env://` rendezvous does. Keys of an earlier start of the job are out of
    sight. From here on the rank ends with its launcher. Called once a process.

    Raises PeerError if the ranks do not meet within `timeout_s`, ConfigError if the port is taken.
    """
    import torch.distributed as dist

    from npu_pipe.comm.meeting import agree_on_start, meet_at

    end_with_launcher(world)
    if world.launcher is Launcher.ONE_PROCESS:
        return dist.HashStore()
    place = f"{world.address}:{world.port}"
    timeout = timedelta(seconds=timeout_s)
    if not _serves(world):

        def tell(why: str) -> None:
            with suppress(OSError):
                words = f"waits for rank 0 at {place}, {timeout_s:g} s at most: {why}"
                print(f"rank {world.rank}: {words}", file=sys.stderr, flush=True)

        why = why_unreachable(world.address, world.port, within_s=timeout_s, tell=tell)
        if why is not None:
            raise _no_store(world, place, timeout_s, why)
    try:
        if world.launcher is Launcher.TORCH_NPU_RUN:
            store = _parallel_store(world, timeout)
        else:
            store = _tcp_store(world, timeout)
    except dist.DistError as error:
        raise _no_store(world, place, timeout_s, str(error).splitlines()[0]) from error
    begun_s = time.monotonic()
    ours = dist.PrefixStore("npu_pipe", store)
    if world.agent_store:
        start = agree_on_start(ours, world.rank, world.size, place=place, connect_s=timeout_s)
        ours = dist.PrefixStore(start, ours)
    left_s = max(1.0, timeout_s - (time.monotonic() - begun_s))
    meet_at(ours, world.rank, world.size, place=place, connect_s=left_s)
    return ours


def _serves(world: World) -> bool:
    return world.rank == 0 and not world.agent_store


def _tcp_store(world: World, timeout: timedelta) -> Store:
    import torch.distributed as dist

    if world.listen_fd is not None:
        # A process that this rank starts must not keep the port after it.
        os.set_inheritable(world.listen_fd, False)
    return dist.TCPStore(
        world.address,
        world.port,
        world.size,
        _serves(world),
        timeout,
        wait_for_workers=False,
        multi_tenant=world.listen_fd is None,
        master_listen_fd=world.listen_fd,
    )


def _parallel_store(world: World, timeout: timedelta) -> Store:
    """The store of torch_npu_run, by the rendezvous that torch_npu registers."""
    import torch.distributed as dist

    from npu_pipe.device.npu_package import why_no_npu

    error = why_no_npu()  # loads torch_npu
    if error is not None and "torch_npu" not in sys.modules:
        raise error
    url = f"parallel://{world.address}:{world.port}"
    meeting = dist.rendezvous(url, world.rank, world.size, timeout=timeout)
    store, _, _ = next(iter(meeting))
    return cast("Store", store)


def _no_store(world: World, place: str, timeout_s: float, words: str) -> NpuPipeError:
    """words: of torch, or of the operating system."""
    found = ""
    if world.sources is not None:
        found = f" (address: {world.sources.address}, port: {world.sources.port})"
    if "EADDRINUSE" in words:
        return ConfigError(
            "rank 0 listens at a port of its own",
            f"{place} is in use{found}",
            "end the job that still holds it, or give another port",
        )
    return PeerError(
        f"all {world.size} ranks meet at {place} within {timeout_s:g} s",
        f"rank {world.rank} found no store there: {words}{found}",
        "look for a rank 0 that did not start, or a firewall between the machines",
    )
