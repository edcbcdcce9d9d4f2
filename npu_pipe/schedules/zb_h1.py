"""ZB-H1: 1F1B with the backward split, in 1F1B's memory. [Qi et al. 2024, 2401.10241]

    rank 0   F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3      (p = 3, m = 4)
    rank 1   .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2   .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

1F1B's order of F and I; rank r runs the W of a microbatch after r more I, the last ones at the
end. The stage before gets its gradient without waiting for W, and W fills the cool-down.
makespan m(F+I+W) + (p-1)(F+I-W); every rank holds min(p, m) activations at most.
"""

from __future__ import annotations

from npu_pipe.ir.schedule import Schedule
from npu_pipe.schedules.pattern import one_stage_split

__all__ = ["zb_h1"]


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """One stage a rank; any number of microbatches."""
    return one_stage_split(
        "zb-h1",
        ranks,
        microbatches,
        warmup=lambda rank: ranks - rank - 1,
        lag=lambda rank: rank,
    )
