"""GPipe: all forwards, then all backwards. [Huang et al. 2019, 1811.06965]

    rank 0   F0 F1 F2 F3 .. .. .. .. B3 B2 B1 B0
    rank 1   .. F0 F1 F2 F3 .. .. B3 B2 B1 B0 ..
    rank 2   .. .. F0 F1 F2 F3 B3 B2 B1 B0 .. ..

makespan (m+p-1)(F+B); every rank holds all m activations.
"""

from __future__ import annotations

import enum

from npu_pipe.errors import ScheduleError
from npu_pipe.ir.action import Kind
from npu_pipe.ir.placement import linear
from npu_pipe.ir.schedule import Schedule
from npu_pipe.schedules.pattern import actions

__all__ = ["BackwardOrder", "gpipe"]


class BackwardOrder(enum.StrEnum):
    """The order of GPipe's backwards: the paper's reverse one, or first in first out."""

    REVERSE = "reverse"
    FIFO = "fifo"


def gpipe(
    ranks: int, microbatches: int, *, backward_order: BackwardOrder = BackwardOrder.REVERSE
) -> Schedule:
    """One stage a rank; any number of microbatches. Raises ScheduleError for another order."""
    if backward_order not in list(BackwardOrder):
        raise ScheduleError(
            f"gpipe's backward_order is one of {', '.join(BackwardOrder)}",
            f"it is {backward_order!r}",
            "give BackwardOrder.REVERSE or BackwardOrder.FIFO",
        )
    forwards = backwards = range(microbatches)
    if backward_order == BackwardOrder.REVERSE:
        backwards = backwards[::-1]
    return Schedule(
        name="gpipe",
        microbatches=microbatches,
        placement=linear(ranks),
        orders=tuple(
            (*actions(Kind.F, rank, forwards), *actions(Kind.B, rank, backwards))
            for rank in range(ranks)
        ),
    )
