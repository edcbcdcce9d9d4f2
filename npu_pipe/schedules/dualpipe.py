"""DualPipe: two replicas of the model, run from both ends. [deepseek-ai/DualPipe, 2412.19437]

Microbatches 0..m/2-1 go down from rank 0; the others run through a second replica that lies the
other way round, its stage s on rank p-1-s. So rank r holds stages r and p-1-r, and in the middle
of the window it runs a forward of one replica beside a backward of the other, as a fused pair:
the transfers inside the one (of experts) hide under the compute of the other. p = 2, m = 4:

    rank 0   F0 F2 F1 B2--- F3&B0--- B3--- I1 W1
    rank 1   F2 F0 F3 B0--- F1&B2--- B1--- I3 W3

The bubble is (p/2-1)(F&B + B - 3W), F&B the time of a fused pair; at full cost, F + B, the
makespan is 3m + p-2 chunk times. Every rank holds p+1 activations at most, and the parameters of
two stages.
"""

from __future__ import annotations

from npu_pipe.errors import ScheduleError
from npu_pipe.ir.action import Step
from npu_pipe.ir.placement import linear
from npu_pipe.ir.schedule import Schedule
from npu_pipe.schedules.dual import dual_order
from npu_pipe.schedules.sizes import either

__all__ = ["dualpipe"]


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Stages r and p-1-r on rank r; p and m even, m >= 2p.

    Raises ScheduleError with the nearest sizes that work otherwise.
    """
    if ranks % 2:
        raise ScheduleError(
            "dualpipe runs from both ends of an even number of ranks",
            f"{ranks} ranks were given",
            f"use {either(ranks - 1, ranks + 1)} ranks and at least twice as many microbatches, or "
            "schedule 'dualpipe-v'",
        )
    if microbatches % 2 or microbatches < 2 * ranks:
        below = microbatches - 1 if microbatches > 2 * ranks else 0
        above = max(microbatches + 1, 2 * ranks)
        raise ScheduleError(
            "dualpipe takes an even number of microbatches, at least twice the ranks",
            f"{microbatches} microbatches were given for {ranks} ranks",
            f"use {either(below, above)} microbatches, or schedule 'zb-h1'",
        )
    half = microbatches // 2
    down, up = range(half), range(half, microbatches)

    def order(rank: int) -> tuple[Step, ...]:
        mirror = ranks - 1 - rank
        from_entry = min(rank, mirror)
        enters_here, enters_there = (down, up) if rank < mirror else (up, down)
        return dual_order(
            (from_entry, ranks - 1 - from_entry),
            (enters_here, enters_there),
            ahead=ranks // 2 - from_entry - 1,
            depth=from_entry + 1,
            steady=half - ranks + from_entry + 1,
        )

    return Schedule(
        name="dualpipe",
        microbatches=microbatches,
        placement=linear(ranks),
        orders=tuple(map(order, range(ranks))),
        mirrored=tuple(up),
    )
