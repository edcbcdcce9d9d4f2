"""Interleaved zero bubble: zb-h1 with v chunks a rank in a loop. [Qi et al. 2401.10241, on the
placement of Narayanan et al. 2021]

Microbatches go in groups of g as in interleaved-1f1b. Rank r runs (v-1)g + (p-1-r) forwards, then
F, I and W in turn, each W after r more I. Small letters are the second chunk (p = 2, v = 2,
m = 2):

    rank 0   F0 F1 f0 f1 .. i0 w0 i1 w1 I0 W0 I1 W1
    rank 1   .. F0 F1 f0 i0 f1 i1 w0 I0 w1 I1 W0 W1

With m a multiple of p the makespan is 3mv + (p-1) chunk times (F = I = W = 1) and every rank
holds v*p activations at most: zb-v's time for any v, but with a transfer where the V turns.
"""

from __future__ import annotations

from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.placement import loop
from npu_pipe.ir.schedule import Schedule
from npu_pipe.schedules.groups import columns_of_groups
from npu_pipe.schedules.pattern import actions, alternate_split

__all__ = ["interleaved_zb"]


def interleaved_zb(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """v = `chunks` stages a rank; the numbers of microbatches that interleaved-1f1b takes.

    Raises ScheduleError with the nearest sizes otherwise.
    """
    columns = columns_of_groups("interleaved-zb", ranks, microbatches, chunks=chunks)
    last = (chunks - 1) * ranks

    def order(rank: int) -> tuple[Action, ...]:
        rising = [rank + c * ranks for c in columns.chunks]
        falling = [rank + last - c * ranks for c in columns.chunks]
        return alternate_split(
            actions(Kind.F, rising, columns.microbatches),
            actions(Kind.I, falling, columns.microbatches),
            actions(Kind.W, falling, columns.microbatches),
            warmup=(chunks - 1) * columns.group_size + ranks - 1 - rank,
            lag=rank,
        )

    return Schedule(
        name="interleaved-zb",
        microbatches=microbatches,
        placement=loop(ranks, chunks),
        orders=tuple(map(order, range(ranks))),
    )
