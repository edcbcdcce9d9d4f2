"""The lanes on the ranks' devices: one more backend in each lane's group, connected up front.

A lane's group sends CPU tensors through gloo and a device's through the device's own backend.
That one makes, for each two ranks of a group, a communicator with one stream for both ways, when
they first use it. Hence:

    one group a lane        so that a rank's sends never stand behind its receives
    made in one order       so that no two ranks wait for each other while they make them
    used once, at the start so that nothing is set up later, when ranks come at different times
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from npu_pipe.comm.device_pairs import Pair
from npu_pipe.comm.device_wait import DeviceWait
from npu_pipe.comm.explain import failed_transfer
from npu_pipe.comm.failure import peer_failures
from npu_pipe.comm.groups import Groups
from npu_pipe.device.device import Device, Stream
from npu_pipe.device.lanes import LaneOptions
from npu_pipe.errors import PeerError
from npu_pipe.ir.program import Lane

__all__ = [
    "Connection",
    "Streams",
    "abort_soon",
    "open_lanes",
    "require_done",
    "require_unbroken",
]

_DEFAULT = LaneOptions()
_PATIENCE_S = 2.0


class Connection(NamedTuple):
    """A communicator of this rank, known by its peer and the first word that went through it.

    backend: whose it is.
    """

    peer: int
    word: dist.Work
    backend: str


class Streams:
    """What transfers are issued under, by lane, and what notes when they have ended."""

    def __init__(self, stream: Callable[[], Stream]) -> None:
        """stream: gives one for each."""
        self.sends = {lane: stream() for lane in Lane}
        self.receives = {lane: stream() for lane in Lane}
        self.send_ends = {lane: stream() for lane in Lane}
        self.receive_ends = {lane: stream() for lane in Lane}


def open_lanes(
    groups: Groups,
    device: Device,
    pairs: Iterable[Pair],
    *,
    wait: DeviceWait,
    options: LaneOptions = _DEFAULT,
) -> tuple[Connection, ...]:
    """Give each lane a backend of the device, and have each pair send a word; collective.

    wait: how to wait for the device. options: of both lanes.
    Raises PeerError when another rank fails meanwhile.
    """
    for lane in Lane:
        group = groups.lane(lane)
        store = dist.PrefixStore(device.backend, group.get_group_store())
        device.add_backend(group, store, name=f"npu_pipe_{lane}", options=options)
    word, found = torch.zeros(1, device=device.place), []
    for lane, low, high in pairs:
        if groups.rank not in (low, high):
            continue
        other = low + high - groups.rank
        sends = groups.rank == (low if lane is Lane.DOWN else high)
        group = groups.lane(lane)
        transfer = partial(group.send if sends else group.recv, [word], other, 0)
        with peer_failures("rank {} was connecting to rank {}", groups.rank, other):
            work: dist.Work = wait.beside(transfer)
            work.wait()
        wait.for_all()
        found.append(Connection(other, work, device.backend))
        require_unbroken(found)
    return tuple(found)


def require_unbroken(connections: Iterable[Connection]) -> None:
    """Raise PeerError where a communicator says that a transfer of it has failed."""
    for peer, word, backend in connections:
        require_done(word, backend, f"between this rank and rank {peer}")


def require_done(work: dist.Work, backend: str, where: str) -> None:
    """Raise PeerError if the communicator of this work says that work of it has failed.

    Events do not tell: a stream passes them after work that failed, too.
    """
    work.is_completed()  # asks the communicator, and keeps what it says
    error = work.exception()
    if error is not None:
        text = f"{error}\n{backend}'s communicator reports an asynchronous error"
        cause = failed_transfer(text, where)
        raise PeerError(cause.rule, cause.facts, cause.cure)


def abort_soon(device: Device, groups: Groups, lanes: Iterable[Lane]) -> None:
    """Break off what these lanes have under way on the device, when a main thread that waits in
    our own code has had the time to leave: where it waits inside the device's library, nothing
    else wakes it."""
    with suppress(RuntimeError):  # they may have been closed
        # Not those of a team that has connected anew by then; and none is kept open until then.
        doomed = [weakref.ref(groups.lane(lane)) for lane in lanes]

        def abort() -> None:
            for each in doomed:
                group = each()
                if group is not None:
                    with suppress(RuntimeError):
                        device.abort(group)

        later = threading.Timer(_PATIENCE_S, abort)
        later.daemon = True
        later.start()
