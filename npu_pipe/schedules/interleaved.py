"""Interleaved 1F1B: v chunks a rank in a loop. [Narayanan et al. 2021, 2104.04473]

Microbatches go in groups of g; a group passes chunk 0 of every rank, then chunk 1, and so on:

    chunk        0 0 0 0 1 1 1 1 0 0 0 0 1 1 1 1     (p = 4, v = 2, m = 8: g = 4)
    microbatch   0 1 2 3 0 1 2 3 4 5 6 7 4 5 6 7

The k-th forward of a rank is column k; backwards take the chunks in reverse. After
2(p-r-1) + (v-1)g forwards, one forward and one backward run in turn. With m a multiple of p
the makespan is 3mv + 3(p-1) chunk times (F = I = W = 1): the bubble of 1F1B divided by v.
"""

from __future__ import annotations

from npu_pipe.ir.action import Kind
from npu_pipe.ir.placement import loop
from npu_pipe.ir.schedule import Schedule
from npu_pipe.schedules.groups import columns_of_groups
from npu_pipe.schedules.pattern import actions, alternate

__all__ = ["interleaved_1f1b"]


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """v = `chunks` stages a rank.

    Any m up to 2p-1; beyond, m has to divide into floor(m/p) groups of one size, which every
    multiple of p does. Raises ScheduleError with the nearest sizes otherwise.
    """
    columns = columns_of_groups("interleaved-1f1b", ranks, microbatches, chunks=chunks)
    last = (chunks - 1) * ranks
    return Schedule(
        name="interleaved-1f1b",
        microbatches=microbatches,
        placement=loop(ranks, chunks),
        orders=tuple(
            alternate(
                actions(Kind.F, [rank + c * ranks for c in columns.chunks], columns.microbatches),
                actions(
                    Kind.B, [rank + last - c * ranks for c in columns.chunks], columns.microbatches
                ),
                warmup=2 * (ranks - rank - 1) + (chunks - 1) * columns.group_size,
            )
            for rank in range(ranks)
        ),
    )
