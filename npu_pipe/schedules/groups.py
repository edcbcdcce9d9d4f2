"""Microbatches in groups, as the interleaved schedules take them.

A group passes chunk 0 of every rank, then chunk 1, and so on; then comes the next group:

    chunk        0 0 0 0 1 1 1 1 0 0 0 0 1 1 1 1     (p = 4, v = 2, m = 8: g = 4)
    microbatch   0 1 2 3 0 1 2 3 4 5 6 7 4 5 6 7

Groups have p microbatches where p divides m. Otherwise there are floor(m/p) of one size, which
has to come out even. [Narayanan et al. 2021, 2104.04473; Megatron-LM]
"""

from __future__ import annotations

from typing import NamedTuple

from npu_pipe.errors import ScheduleError
from npu_pipe.schedules.sizes import either

__all__ = ["Columns", "columns_of_groups"]


class Columns(NamedTuple):
    """group_size: g. chunks, microbatches: the two lines of the picture."""

    group_size: int
    chunks: list[int]
    microbatches: list[int]


def columns_of_groups(name: str, ranks: int, microbatches: int, *, chunks: int) -> Columns:
    """Raises ScheduleError, with the nearest sizes that work, where groups do not come out even.

    name: the schedule's, for the message.
    """
    groups = max(1, microbatches // ranks)
    if microbatches % groups:
        raise ScheduleError(
            f"{name} takes microbatches in floor(m/p) groups of one size",
            f"{microbatches} microbatches on {ranks} ranks do not divide into {groups} groups",
            f"use {_nearest(ranks, microbatches)} microbatches, or schedule '1f1b'",
        )
    size = microbatches // groups
    of_chunk = [range(first, first + size) for first in range(0, microbatches, size)]
    return Columns(
        group_size=size,
        chunks=[c for _ in of_chunk for c in range(chunks) for _ in range(size)],
        microbatches=[i for group in of_chunk for _ in range(chunks) for i in group],
    )


def _nearest(ranks: int, microbatches: int) -> str:
    works = [m for m in range(1, microbatches + ranks + 1) if m % max(1, m // ranks) == 0]
    below = max(m for m in works if m < microbatches)
    above = min(m for m in works if m > microbatches)
    return either(below, above)
