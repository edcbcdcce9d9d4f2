"""V-Min: a third of 1F1B's activations, on the V placement. [Qi et al. 2405.15362]

A pattern that repeats every six slots: on rank r the first microbatch has F, f, i and I (small
letters are stage 2p-1-r) in slots r, 2p-r-1, 2p+t+r and 4p+t-r-1, with t = 2 where 3 divides p,
else 0; so each goes down and up the V without a stop, and is let go as soon as possible;
p = 2, m = 3:

    rank 0   F0 .. .. f0 i0 w0 F1 I0 W0 f1 i1 w1 F2 I1 W1 f2 i2 w2 .. I2 W2
    rank 1   .. F0 f0 .. .. i0 I0 F1 f1 w0 W0 i1 I1 F2 f2 w1 W1 i2 I2 w2 W2

Every rank holds 2 * floor((p+4)/3) chunks at most. From m = 2 on the makespan is 6m + 4p-5 chunk
times (F = I = W = 1), 6m + 4p-3 where 3 divides p. The pattern only fits costs that are about
equal: with F, I, W of 10, 12, 8 ranks wait for each other in every period, and 1f1b is faster.
"""

from __future__ import annotations

from npu_pipe.ir.placement import vee
from npu_pipe.ir.schedule import Schedule
from npu_pipe.schedules.v_pattern import Offsets, in_order, pattern_rows

__all__ = ["v_min"]


def v_min(ranks: int, microbatches: int) -> Schedule:
    """Two stages a rank; any number of microbatches."""
    return Schedule(
        name="v-min",
        microbatches=microbatches,
        placement=vee(ranks),
        orders=tuple(map(in_order, pattern_rows(ranks, microbatches, _offsets))),
    )


def _offsets(p: int, r: int) -> Offsets:
    t = 2 if p % 3 == 0 else 0
    return r, 2 * p - r - 1, 2 * p + t + r, 4 * p + t - r - 1
