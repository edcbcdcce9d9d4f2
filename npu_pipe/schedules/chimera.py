"""Chimera: two replicas of the model, run from both ends. [Li & Hoefler 2021, 2107.06925]

Microbatches 0..m/2-1 go down from rank 0; the others run through a second replica that lies the
other way round, its stage s on rank p-1-s. Units of p microbatches, half of them each way, fit
into each other; in a unit, stage s runs microbatch j of its direction at 2j+s and its backward
at 2j+2p-1-s. p = 4, m = 4; microbatches 2 and 3 are the second replica's (F = B = 1):

    rank 0   F0 F1 .. F2 B2 F3 B3 B0 .. B1
    rank 1   .. F0 F2 F1 F3 B2 B0 B3 B1 ..
    rank 2   .. F2 F0 F3 F1 B0 B2 B1 B3 ..
    rank 3   F2 F3 .. F0 B0 F1 B1 B2 .. B3

Unit u begins at 2pu. Every rank runs the slots of both replicas in order.
makespan 2m + p-2 where B takes as long as F. With B = 2F units do not fit behind each other as
well, and 1f1b is faster. Every rank holds p activations at most, and the parameters of two
stages.
"""

from __future__ import annotations

from npu_pipe.errors import ScheduleError
from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.placement import linear
from npu_pipe.ir.schedule import Schedule
from npu_pipe.schedules.pattern import actions
from npu_pipe.schedules.sizes import either

__all__ = ["chimera"]


def chimera(ranks: int, microbatches: int) -> Schedule:
    """Stages r and p-1-r on rank r; p even, m a multiple of p.

    Raises ScheduleError with the nearest sizes that work otherwise.
    """
    if ranks % 2:
        raise ScheduleError(
            "chimera runs from both ends of an even number of ranks",
            f"{ranks} ranks were given",
            f"use {either(ranks - 1, ranks + 1)} ranks and a multiple of that many microbatches, "
            "or schedule '1f1b'",
        )
    if microbatches % ranks:
        below = microbatches // ranks * ranks
        raise ScheduleError(
            "chimera takes units of as many microbatches as ranks",
            f"{microbatches} microbatches were given for {ranks} ranks",
            f"use {either(below, below + ranks)} microbatches, or schedule '1f1b'",
        )
    half = microbatches // 2

    def slots(kind: Kind, stage: int, numbers: range) -> list[tuple[int, Action]]:
        first = stage if kind is Kind.F else 2 * ranks - 1 - stage
        of_unit = [first + 2 * j for j in range(ranks // 2)]
        starts = (
            start + slot for start in range(0, 2 * microbatches, 2 * ranks) for slot in of_unit
        )
        return list(zip(starts, actions(kind, stage, numbers), strict=True))

    def order(rank: int) -> tuple[Action, ...]:
        down, up = (rank, range(half)), (ranks - 1 - rank, range(half, microbatches))
        everything = sorted(
            slot for way in (down, up) for kind in (Kind.F, Kind.B) for slot in slots(kind, *way)
        )
        return tuple(action for _, action in everything)

    return Schedule(
        name="chimera",
        microbatches=microbatches,
        placement=linear(ranks),
        orders=tuple(map(order, range(ranks))),
        mirrored=tuple(range(half, microbatches)),
    )
