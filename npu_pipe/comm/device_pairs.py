"""Which ranks of a pipeline send to each other, and so need a communicator. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.program import Lane, route
from npu_pipe.ir.schedule import Schedule
from npu_pipe.lowering.evaluation import forward_only
from npu_pipe.runtime.tied import Tied

__all__ = ["Pair", "pairs_used"]


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
