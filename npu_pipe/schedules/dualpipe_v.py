"""DualPipeV: DualPipe cut in half, on the V placement. [deepseek-ai/DualPipe; Sea AI Lab]

Rank r holds stages r (capitals) and 2p-1-r (small letters), so one copy of the parameters is
enough. DualPipe's steps, the turn of the V in place of the middle; p = 2, m = 4:

    rank 0   F0 F1 F2 f0 i0 w0 f1 F3&b1--- .. f2&B0--- b2--- .. f3&B1--- b3--- I2 W2 I3 W3
    rank 1   .. F0 f0 F1 f1 F2 b0--- f2&B0--- F3&b1--- f3&B1--- b2--- B2--- .. i3 I3 w3 W3

The bubble is (p-1)(F&B + B - 3W), F&B the time of a fused pair; at full cost, F + B, the makespan
is 6m + 2p-2 chunk times (F = I = W = 1). Every rank holds 2p+1 chunks at most. A fused pair that
overlaps nothing only delays what its halves give to other ranks: zb-v is better then.
"""

from __future__ import annotations

from npu_pipe.errors import ScheduleError
from npu_pipe.ir.action import Step
from npu_pipe.ir.placement import vee
from npu_pipe.ir.schedule import Schedule
from npu_pipe.schedules.dual import dual_order

__all__ = ["dualpipe_v"]


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """Two stages a rank; m >= 2p. Raises ScheduleError otherwise."""
    if microbatches < 2 * ranks:
        raise ScheduleError(
            "dualpipe-v takes at least twice as many microbatches as ranks",
            f"{microbatches} microbatches were given for {ranks} ranks",
            f"use {2 * ranks} microbatches, or schedule 'zb-v'",
        )
    everything = range(microbatches)

    def order(rank: int) -> tuple[Step, ...]:
        return dual_order(
            (rank, 2 * ranks - 1 - rank),
            (everything, everything),
            ahead=ranks - rank - 1,
            depth=rank + 1,
            steady=microbatches - 2 * ranks + rank + 1,
        )

    return Schedule(
        name="dualpipe-v",
        microbatches=microbatches,
        placement=vee(ranks),
        orders=tuple(map(order, range(ranks))),
    )
