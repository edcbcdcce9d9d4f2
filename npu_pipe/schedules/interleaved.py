"""Interleaved 1F1B: v chunks a rank in a loop. [Narayanan et al. 2021, 2104.04473]

Microbatches go in groups of g; a group passes chunk 0 of every rank, then chunk 1, and so on:

    chunk        0 0 0 0 1 1 1 1 0 0 0 0 1 1 1 1     (p = 4, v = 2, m = 8: g = 4)
    microbatch   0 1 2 3 0 1 2 3 4 5 6 7 4 5 6 7

The k-th forward of a rank is column k; backwards take the chunks in reverse. After
2(p-r-1) + (v-1)g forwards, one forward and one backward run in turn. With m a multiple of p
the makespan is 3mv + 3(p-1) chunk times (F = I = W = 1): the bubble of 1F1B divided by v.
"""

from __future__ import annotations

from npu_pipe.errors import ScheduleError
from npu_pipe.ir.placement import loop
from npu_pipe.ir.schedule import Schedule
from npu_pipe.schedules.pattern import alternate, backward, forward

__all__ = ["interleaved_1f1b"]


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """v = `chunks` stages a rank.

    Any m up to 2p-1; beyond, m has to divide into floor(m/p) groups of one size, which every
    multiple of p does. Raises ScheduleError with the nearest sizes otherwise.
    """
    groups = max(1, microbatches // ranks)
    if microbatches % groups:
        raise ScheduleError(
            "interleaved-1f1b takes microbatches in floor(m/p) groups of one size",
            f"{microbatches} microbatches on {ranks} ranks do not divide into {groups} groups",
            f"use {_nearest(ranks, microbatches)} microbatches, or schedule '1f1b'",
        )
    size = microbatches // groups
    columns = [
        (chunk, group * size + i)
        for group in range(groups)
        for chunk in range(chunks)
        for i in range(size)
    ]
    return Schedule(
        name="interleaved-1f1b",
        microbatches=microbatches,
        placement=loop(ranks, chunks),
        orders=tuple(
            alternate(
                [forward(c * ranks + rank, i) for c, i in columns],
                [backward((chunks - 1 - c) * ranks + rank, i) for c, i in columns],
                warmup=2 * (ranks - rank - 1) + (chunks - 1) * size,
            )
            for rank in range(ranks)
        ),
    )


def _nearest(ranks: int, microbatches: int) -> str:
    works = [m for m in range(1, microbatches + ranks + 1) if m % max(1, m // ranks) == 0]
    below = max(m for m in works if m < microbatches)
    above = min(m for m in works if m > microbatches)
    return f"{below} or {above}"
