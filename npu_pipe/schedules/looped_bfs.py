"""Looped breadth-first: GPipe with v chunks a rank. [Lamy-Poirier 2022, 2211.05953]

All microbatches pass chunk 0 of every rank, then chunk 1, and so on; the backwards run all that
in reverse. Small letters are the second chunk (p = 2, v = 2, m = 2, F = B = 1):

    rank 0   F0 F1 f0 f1 .. .. b1 b0 B1 B0
    rank 1   .. F0 F1 f0 f1 b1 b0 B1 B0 ..

With m >= p the makespan is 3mv + 3(p-1) chunk times (F = I = W = 1): the bubble of GPipe divided
by v, and a stage has all its microbatches in a row, which is what sharded parameters like.
With m < p each further chunk waits another 3(p-m). Every rank holds all m*v activations.
"""

from __future__ import annotations

from itertools import chain

from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.placement import loop
from npu_pipe.ir.schedule import Schedule
from npu_pipe.schedules.pattern import actions

__all__ = ["looped_bfs"]


def looped_bfs(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """v = `chunks` stages a rank; any number of microbatches."""
    everything = range(microbatches)

    def order(rank: int) -> tuple[Action, ...]:
        stages = range(rank, ranks * chunks, ranks)
        forwards = (actions(Kind.F, stage, everything) for stage in stages)
        backwards = (actions(Kind.B, stage, everything[::-1]) for stage in stages[::-1])
        return tuple(chain(*forwards, *backwards))

    return Schedule(
        name="looped-bfs",
        microbatches=microbatches,
        placement=loop(ranks, chunks),
        orders=tuple(map(order, range(ranks))),
    )
