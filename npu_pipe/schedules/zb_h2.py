"""ZB-H2: no rank idles between its first and its last action. [Qi et al. 2024, 2401.10241]

    rank 0   F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .. ..      (p = 3, m = 5)
    rank 1   .. F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 ..
    rank 2   .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

Rank r runs 2(p-r)-1 forwards before its first I and lets each W wait for 2r more I. With
m >= 2p-1 the span is m(F+I+W); every rank holds min(2p-1, m) activations at most. With m < 2p-1
there is less to fill the cool-down with, and W waits for r + (m-p) more I, but for r at least.

At equal costs and without transfer times the makespan is zb-h1's, 3m + (p-1) from m = p on, for
twice the memory. The deeper warm-up pays with slow transfers, unequal stages or jitter; and the
shorter span where the next window starts without a flush.
"""

from __future__ import annotations

from npu_pipe.ir.schedule import Schedule
from npu_pipe.schedules.pattern import one_stage_split

__all__ = ["zb_h2"]


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """One stage a rank; any number of microbatches."""
    return one_stage_split(
        "zb-h2",
        ranks,
        microbatches,
        warmup=lambda rank: 2 * (ranks - rank - 1),
        lag=lambda rank: rank + min(rank, max(0, microbatches - ranks)),
    )
