"""GPipe: all forwards, then all backwards. [Huang et al. 2019, 1811.06965]

    rank 0   F0 F1 F2 F3 .. .. .. .. B3 B2 B1 B0
    rank 1   .. F0 F1 F2 F3 .. .. B3 B2 B1 B0 ..
    rank 2   .. .. F0 F1 F2 F3 B3 B2 B1 B0 .. ..

makespan (m+p-1)(F+B); every rank holds all m activations.
"""

from __future__ import annotations

import enum

from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.placement import linear
from npu_pipe.ir.schedule import Schedule

__all__ = ["BackwardOrder", "gpipe"]


class BackwardOrder(enum.StrEnum):
    """The order of GPipe's backwards: the paper's reverse one, or first in first out."""

    REVERSE = "reverse"
    FIFO = "fifo"


def gpipe(
    ranks: int, microbatches: int, *, backward_order: BackwardOrder = BackwardOrder.REVERSE
) -> Schedule:
    """One stage a rank; any number of microbatches."""
    backwards = range(microbatches)
    if backward_order is BackwardOrder.REVERSE:
        backwards = backwards[::-1]
    return Schedule(
        name="gpipe",
        microbatches=microbatches,
        placement=linear(ranks),
        orders=tuple(
            (
                *(Action(Kind.F, rank, i) for i in range(microbatches)),
                *(Action(Kind.B, rank, i) for i in backwards),
            )
            for rank in range(ranks)
        ),
    )
