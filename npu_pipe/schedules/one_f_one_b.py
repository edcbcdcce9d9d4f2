"""1F1B: warm up, then one forward and one backward in turn. [PipeDream-Flush, Narayanan et
al. 2021; DAPPLE, Fan et al. 2021]

    rank 0   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3      (p = 3, m = 4, F = B = 1)
    rank 1   .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    rank 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

Rank r runs w = min(p-r-1, m) forwards before its first pair, so it holds min(p-r, m)
activations at most; the makespan is GPipe's, (m+p-1)(F+B).
"""

from __future__ import annotations

from npu_pipe.ir.action import Kind
from npu_pipe.ir.placement import linear
from npu_pipe.ir.schedule import Schedule
from npu_pipe.schedules.pattern import actions, alternate

__all__ = ["one_f_one_b"]


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """One stage a rank; any number of microbatches."""
    everything = range(microbatches)
    return Schedule(
        name="1f1b",
        microbatches=microbatches,
        placement=linear(ranks),
        orders=tuple(
            alternate(
                actions(Kind.F, rank, everything),
                actions(Kind.B, rank, everything),
                warmup=ranks - rank - 1,
            )
            for rank in range(ranks)
        ),
    )
