"""The dependency rule, written once.

    F(s)  needs  F(s-1)              the activation from the stage before
    I(s)  needs  F(s) and I(s+1)     what its own forward kept; the gradient from the stage after
    W(s)  needs  I(s)
    B(s)  is I(s) then W(s) in one action: it needs what I needs and gives what both give

and, once transfers are placed between ranks,

    SEND_F(s) needs F(s);  RECV_F(s+1) needs SEND_F(s);  F(s+1) needs RECV_F(s+1)
    SEND_B(s) needs I(s);  RECV_B(s-1) needs SEND_B(s);  I(s-1) needs RECV_B(s-1)

always of the same microbatch; what lies before the first or after the last stage is not
needed. [Huang et al. 2019; Qi et al. 2401.10241 for I and W]

`Table` is a whole schedule or program as integer arrays with these needs resolved; checking,
simulating and lowering lean on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from npu_pipe.errors import ScheduleError
from npu_pipe.ir.action import Action, FusedPair, Kind, Step

__all__ = ["Table", "needs"]

Ints = npt.NDArray[np.int64]

KINDS = tuple(Kind)
_CODE = {kind: code for code, kind in enumerate(KINDS)}
_F, _B, _I, _W, _SEND_F, _RECV_F, _SEND_B, _RECV_B = range(len(KINDS))

# kind -> (what it needs, of which stage relative to its own), at most two.
_NEEDS: dict[Kind, tuple[tuple[Kind, int], ...]] = {
    Kind.F: ((Kind.F, -1),),
    Kind.B: ((Kind.F, 0), (Kind.I, +1)),
    Kind.I: ((Kind.F, 0), (Kind.I, +1)),
    Kind.W: ((Kind.I, 0),),
    Kind.SEND_F: ((Kind.F, 0),),
    Kind.RECV_F: ((Kind.SEND_F, -1),),
    Kind.SEND_B: ((Kind.I, 0),),
    Kind.RECV_B: ((Kind.SEND_B, +1),),
}


def needs(action: Action, stages: int) -> tuple[Action, ...]:
    """What must have ended before `action` may start. An I among them is given by a B too."""
    return tuple(
        Action(kind, action.stage + offset, action.microbatch)
        for kind, offset in _NEEDS[action.kind]
        if 0 <= action.stage + offset < stages
    )


# The same rule as arrays indexed by kind code and by which need, first or second.
_NEED_KIND = np.full((len(KINDS), 2), -1)
_NEED_OFFSET = np.zeros((len(KINDS), 2), dtype=np.int64)
_RECEIVE = np.array(
    [_RECV_F, _RECV_B, _RECV_B, -1, -1, -1, -1, -1]
)  # by kind: how it gets its input
for _kind, _pairs in _NEEDS.items():
    for _which, (_needed, _offset) in enumerate(_pairs):
        _NEED_KIND[_CODE[_kind], _which] = _CODE[_needed]
        _NEED_OFFSET[_CODE[_kind], _which] = _offset


@dataclass(frozen=True, eq=False)
class Table:
    """All actions, rank after rank, as columns; rows are numbered from 0.

    starts[r]:starts[r+1] are the rows of rank r. A fused pair takes two rows, the first of
    which has `joined` set. `position` is the index of the row's step in its rank's order.
    """

    starts: Ints
    rank: Ints
    position: Ints
    kind: Ints
    stage: Ints
    microbatch: Ints
    joined: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, orders: tuple[tuple[Step, ...], ...]) -> Table:
        lengths: list[int] = []
        joined: list[bool] = []
        position: list[int] = []
        flat: list[Action] = []
        for order in orders:
            before = len(flat)
            for index, step in enumerate(order):
                if type(step) is FusedPair:
                    flat += step
                    joined += (True, False)
                    position += (index, index)
                else:
                    flat.append(step)  # type: ignore[arg-type]  # the other half of Step
                    joined.append(False)
                    position.append(index)
            lengths.append(len(flat) - before)
        try:
            cells = chain.from_iterable((_CODE[kind], stage, mb) for kind, stage, mb in flat)
            numbers = np.fromiter(cells, dtype=np.int64, count=3 * len(flat)).reshape(-1, 3)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ScheduleError(
                "orders are made of Action(Kind, stage, microbatch) with whole numbers",
                f"one of their steps is not ({type(error).__name__}: {error})",
                "build them from Action and FusedPair, or read them with parse_step",
            ) from error
        return cls(
            starts=np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))),
            rank=np.repeat(np.arange(len(orders)), lengths),
            position=np.array(position, dtype=np.int64),
            kind=numbers[:, 0],
            stage=numbers[:, 1],
            microbatch=numbers[:, 2],
            joined=np.array(joined, dtype=np.bool_),
        )

    def __len__(self) -> int:
        return len(self.kind)

    def where(self, stages: int, microbatches: int) -> Ints:
        """[kind code, stage, microbatch] -> row of the action whose end gives it, or -1."""
        where = np.full((len(KINDS), stages, microbatches), -1, dtype=np.int64)
        where[self.kind, self.stage, self.microbatch] = np.arange(len(self))
        for half in (_I, _W):
            np.copyto(where[half], where[_B], where=where[half] < 0)
        return where

    def needs(self, where: Ints) -> Ints:
        """Per row, the two rows it needs; -1 where it needs none (or that one is missing).

        The activation or gradient of another rank is needed through its RECV where the table
        has one, else directly.
        """
        kind, offset = _NEED_KIND[self.kind], _NEED_OFFSET[self.kind]
        stage = self.stage[:, None] + offset
        inside = (kind >= 0) & (stage >= 0) & (stage < where.shape[1])
        rows = where[kind, np.where(inside, stage, 0), self.microbatch[:, None]]
        received = where[_RECEIVE[self.kind], self.stage, self.microbatch]
        through = (_RECEIVE[self.kind] >= 0) & (received >= 0)
        across = (offset != 0) & through[:, None]
        return np.where(inside, np.where(across, received[:, None], rows), -1)

    def action(self, row: int) -> Action:
        return Action(KINDS[self.kind[row]], int(self.stage[row]), int(self.microbatch[row]))
