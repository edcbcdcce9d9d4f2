"""Schedules on the V placement that repeat one pattern every six slots. [Qi et al. 2405.15362]

A pattern gives, per rank, the slots of F, f, i and I of microbatch 0 (small letters are stage
2p-1-r); microbatch k has them 6k later. Two slots of six are left, and the W take these, each
as soon as there is a free one, first in first out. For p = 2 and offsets 0 3 4 7 | 1 2 5 6:

    slot     0  1  2  3  4  5  6  7  8  9  10 11 12 ..
    rank 0   F0 .. .. f0 i0 w0 F1 I0 W0 f1 i1 w1 F2 ..
    rank 1   .. F0 f0 .. .. i0 I0 F1 f1 w0 W0 i1 I1 ..
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from npu_pipe.ir.action import Action, Kind
from npu_pipe.schedules.pattern import actions

__all__ = ["PERIOD", "Offsets", "Row", "in_order", "pattern_rows"]

PERIOD = 6

Offsets = tuple[int, int, int, int]
"""The slots of F, f, i and I of the first microbatch on one rank."""

Row = list[Action | None]
"""What one rank does in each slot."""


def pattern_rows(
    ranks: int, microbatches: int, offsets: Callable[[int, int], Offsets]
) -> list[Row]:
    """One row a rank, all of one length. offsets: of (ranks, rank)."""
    rows = [
        _row(rank, 2 * ranks - 1 - rank, microbatches, offsets(ranks, rank))
        for rank in range(ranks)
    ]
    longest = max(map(len, rows))
    return [row + [None] * (longest - len(row)) for row in rows]


def in_order(row: Row) -> tuple[Action, ...]:
    """The row without its idle slots."""
    return tuple(filter(None, row))


def _row(near: int, far: int, microbatches: int, offsets: Offsets) -> Row:
    length = PERIOD * (microbatches - 1) + 1
    row: Row = [None] * (max(offsets) + length)
    chains = ((Kind.F, near), (Kind.F, far), (Kind.I, far), (Kind.I, near))
    for (kind, stage), offset in zip(chains, offsets, strict=True):
        row[offset : offset + length : PERIOD] = actions(kind, stage, range(microbatches))
    waiting: deque[Action] = deque()
    for slot, action in enumerate(row):
        if action is None:
            if waiting:
                row[slot] = waiting.popleft()
        elif action[0] is Kind.I:
            waiting.append(Action(Kind.W, action[1], action[2]))
    return [*row, *waiting]
