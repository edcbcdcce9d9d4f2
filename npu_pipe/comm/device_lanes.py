"""The lanes on the ranks' devices: one more backend in each lane's group, connected up front.

A lane's group sends CPU tensors through gloo and a device's through the device's own backend.
That one makes, for each two ranks of a group, a communicator with one stream for both ways, when
they first use it. Hence:

    one group a lane        so that a rank's sends never stand behind its receives
    made in one order       so that no two ranks wait for each other while they make them
    used once, at the start so that nothing is set up later, when ranks come at different times
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
import torch.distributed as dist

from npu_pipe.comm.device_wait import DeviceWait
from npu_pipe.comm.failure import peer_failures
from npu_pipe.comm.groups import Groups
from npu_pipe.device.device import Device, LaneOptions
from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.program import Lane, route
from npu_pipe.ir.schedule import Schedule
from npu_pipe.lowering.evaluation import forward_only
from npu_pipe.runtime.tied import Tied

__all__ = ["Pair", "open_lanes", "pairs_used"]


class Pair(NamedTuple):
    """Two ranks that use a lane: low < high. One communicator."""

    lane: Lane
    low: int
    high: int


def pairs_used(schedule: Schedule, tied: Sequence[Tied] = ()) -> tuple[Pair, ...]:
    """All that a pipeline of this schedule sends between, in the order in which they connect."""
    found = {*_pairs_of(schedule), *_pairs_of(forward_only(schedule, 1))}
    if schedule.mirrored:  # replicas swap gradients
        for rank in range(schedule.ranks // 2):
            found |= _both_lanes((rank, schedule.ranks - 1 - rank))
    for each in tied:
        found |= _both_lanes(_holders(schedule, (stage for stage, _ in each.copies)))
    return tuple(sorted(found))


def open_lanes(groups: Groups, device: Device, pairs: Iterable[Pair], *, wait: DeviceWait) -> None:
    """Give each lane a backend of the device, and have each pair send a word; collective.

    wait: how to wait for the device. Raises PeerError when another rank fails meanwhile.
    """
    for lane in Lane:
        group = groups.lane(lane)
        store = dist.PrefixStore(device.backend, group.get_group_store())
        device.add_backend(group, store, options=LaneOptions(name=f"npu_pipe_{lane}"))
    word = torch.zeros(1, device=device.place)
    for lane, low, high in pairs:
        if groups.rank not in (low, high):
            continue
        other = low + high - groups.rank
        sends = groups.rank == (low if lane is Lane.DOWN else high)
        group = groups.lane(lane)
        with peer_failures("rank {} was connecting to rank {}", groups.rank, other):
            work = group.send([word], other, 0) if sends else group.recv([word], other, 0)
            work.wait()
        wait.for_all()


def _pairs_of(schedule: Schedule) -> set[Pair]:
    kinds = ((Kind.SEND_F, 0), (Kind.SEND_B, 1)) if schedule.training else ((Kind.SEND_F, 0),)
    found = set()
    for boundary in range(schedule.stages - 1):
        for microbatch in range(schedule.microbatches):
            for kind, offset in kinds:
                source, target, lane = route(schedule, Action(kind, boundary + offset, microbatch))
                if source != target:
                    found.add(Pair(lane, min(source, target), max(source, target)))
    return found


def _holders(schedule: Schedule, stages: Iterable[int]) -> set[int]:
    wanted = set(stages)
    return {rank for rank in range(schedule.ranks) if wanted.intersection(schedule.stages_of(rank))}


def _both_lanes(ranks: Iterable[int]) -> set[Pair]:
    return {Pair(lane, low, high) for low, high in combinations(sorted(ranks), 2) for lane in Lane}
