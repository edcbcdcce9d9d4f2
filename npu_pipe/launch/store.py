"""The key-value store at which the ranks of a job meet."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from npu_pipe.errors import ConfigError, NpuPipeError, PeerError, RunError
from npu_pipe.launch.lifeline import end_with_launcher
from npu_pipe.launch.reach import QUIET_S, find_address, find_listener, why_in_vain
from npu_pipe.launch.say import say
from npu_pipe.launch.world import Launcher, World

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["open_store"]

_CANNOT_LISTEN = {"EADDRINUSE": "is in use", "EACCES": "is kept for root"}


def open_store(world: World, *, timeout_s: float) -> Store:
    """Open the store of the job; returns when all ranks have come.

    One process keeps it in memory. A local launch serves it in rank 0 on the socket that the
    parent has bound. Under torchrun the agent serves it if it says so, else rank 0 does; that is
    what torch's own `env://` rendezvous does. Keys of an earlier start of the job are out of
    sight. From here on the rank ends with its launcher. Called once a process.

    Raises PeerError if the ranks do not meet within `timeout_s`, ConfigError if the port cannot be
    used, RunError if another process is this rank already.
    """
    import torch.distributed as dist

    from npu_pipe.comm.meeting import agree_on_start, meet_at

    end_with_launcher(world)
    if world.launcher is Launcher.ONE_PROCESS:
        return dist.HashStore()
    begun_s = time.monotonic()
    ours = _enter(world, timeout_s)
    if world.agent_store:
        start = agree_on_start(ours, world.rank, world.size, place=world.place, connect_s=timeout_s)
        ours = dist.PrefixStore(start, ours)
    left_s = max(1, round(timeout_s - (time.monotonic() - begun_s)))
    meet_at(ours, world.rank, world.size, place=world.place, connect_s=left_s)
    return ours


def _enter(world: World, timeout_s: float) -> Store:
    """The store, and this rank alone of its number."""
    import torch.distributed as dist

    from npu_pipe.comm.meeting import patiently

    def tell(why: str) -> None:
        words = f"waits for rank 0 at {world.place}, {timeout_s:g} s at most: {why}"
        say(f"rank {world.rank}: {words}")

    until_s = time.monotonic() + timeout_s
    attempt = find_address if _serves(world) else find_listener
    why = why_in_vain(attempt, world.address, world.port, within_s=timeout_s, tell=tell)
    if why is not None:
        raise _no_store(world, timeout_s, why)
    silence = threading.Timer(QUIET_S, tell, ["who listens there does not answer"])
    silence.daemon = True
    silence.start()

    def enter() -> Store:
        opened = _parallel_store if world.launcher is Launcher.TORCH_NPU_RUN else _tcp_store
        store = dist.PrefixStore("npu_pipe", opened(world, timedelta(seconds=timeout_s)))
        if not world.agent_store:
            _be_the_only_one(world, store)
        return store

    try:
        return patiently(enter, max(1.0, until_s - time.monotonic()))
    except NpuPipeError:
        raise
    except RuntimeError as error:  # of which torch's own errors are
        raise _no_store(world, timeout_s, str(error).splitlines()[0]) from error
    finally:
        silence.cancel()


def _be_the_only_one(world: World, store: Store) -> None:
    """Raise RunError if another process is this rank: of a second job that meets at the same port,
    of the start before this one, or of a node that was given the wrong number."""
    from npu_pipe.comm.meeting import claim_rank

    me = f"process {os.getpid()} of {socket.gethostname()}"
    first = claim_rank(store, world.rank, me=me)
    if first is not None:
        raise RunError(
            "each rank is one process, and each job meets at a place of its own",
            f"{me} came to {world.place} as rank {world.rank} of {world.size}, which {first} is "
            f"already{_sources(world)}",
            "let the job before end, give each job of a host a MASTER_PORT of its own, and each "
            "process another rank; msrun: the same --local_worker_num on every node",
        )


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
    url = f"parallel://{world.place}"
    meeting = dist.rendezvous(url, world.rank, world.size, timeout=timeout)
    store, _, _ = next(iter(meeting))
    return cast("Store", store)


def _no_store(world: World, timeout_s: float, words: str) -> NpuPipeError:
    """words: of torch, or of the operating system."""
    why = next((why for name, why in _CANNOT_LISTEN.items() if name in words), None)
    if why is not None:
        return ConfigError(
            "rank 0 listens at a port of its own",
            f"{world.place} {why}{_sources(world)}",
            "end the job that still holds it, or give another port",
        )
    return PeerError(
        f"all {world.size} ranks meet at {world.place} within {timeout_s:g} s",
        f"rank {world.rank} found no store there: {words}{_sources(world)}",
        "look for a rank 0 that did not start, another program at this port, or a firewall "
        "between the machines",
    )


def _sources(world: World) -> str:
    if world.sources is None:
        return ""
    return f" (address: {world.sources.address}, port: {world.sources.port})"


def _serves(world: World) -> bool:
    return world.rank == 0 and not world.agent_store
