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
from typing import Any

import numpy as np
import numpy.typing as npt

from npu_pipe.errors import ScheduleError
from npu_pipe.ir.action import Action, FusedPair, Kind, Step

__all__ = ["KINDS", "Table", "needs"]

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
# By kind: the transfer that brings its input.
_RECEIVE = np.array([_RECV_F, _RECV_B, _RECV_B, -1, -1, -1, -1, -1])
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
        """Raises ScheduleError, with rank and position, for what is not a step."""
        steps = list(chain.from_iterable(orders))
        types, flat = set(map(type, steps)), steps
        width = np.ones(len(steps), dtype=np.int64)
        if FusedPair in types:
            width += [type(step) is FusedPair for step in steps]
            flat = list(chain.from_iterable(map(_actions, steps)))
            types = set(map(type, flat))
        parts: list[Any] = list(chain.from_iterable(flat)) if types <= {Action} else [None]
        if not set(map(type, parts)) <= {Kind, int}:
            raise _not_a_step(orders)
        try:
            kind = np.fromiter(map(_CODE.__getitem__, parts[::3]), np.int64, len(flat))
            stage, microbatch = (np.array(parts[n::3], dtype=np.int64) for n in (1, 2))
        except (KeyError, ValueError, OverflowError):
            raise _not_a_step(orders) from None
        rank = np.repeat(np.arange(len(orders)), list(map(len, orders)))
        joined = np.zeros(len(flat), dtype=np.bool_)
        joined[(np.cumsum(width) - 2)[width == 2]] = True
        return cls.of_rows(
            len(orders), np.repeat(rank, width), kind, stage, microbatch, joined=joined
        )

    @classmethod
    def of_rows(
        cls,
        ranks: int,
        rank: Ints,
        kind: Ints,
        stage: Ints,
        microbatch: Ints,
        *,
        joined: npt.NDArray[np.bool_],
    ) -> Table:
        """The table of these columns, rank after rank."""
        starts = np.searchsorted(rank, np.arange(ranks + 1))
        step = np.cumsum(np.concatenate(([True], ~joined)))  # one more than there are rows
        position = step[:-1] - step[starts[:-1]][rank]
        return cls(starts, rank, position, kind, stage, microbatch, joined)

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def is_compute(self) -> npt.NDArray[np.bool_]:
        return self.kind < _SEND_F

    @property
    def is_send(self) -> npt.NDArray[np.bool_]:
        sends: npt.NDArray[np.bool_] = (self.kind == _SEND_F) | (self.kind == _SEND_B)
        return sends

    @property
    def is_receive(self) -> npt.NDArray[np.bool_]:
        receives: npt.NDArray[np.bool_] = (self.kind == _RECV_F) | (self.kind == _RECV_B)
        return receives

    @property
    def lead(self) -> Ints:
        """Per row, the row that leads its step: itself, but for second halves of fused pairs."""
        return np.arange(len(self)) - np.concatenate(([False], self.joined))[: len(self)]

    def step_rows(self) -> Ints:
        """The rows that lead a step."""
        return np.flatnonzero(~np.concatenate(([False], self.joined))[: len(self)])

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
        _, stages, microbatches = where.shape
        needed = np.empty((len(self), 2), dtype=np.int64)
        receive = _RECEIVE[self.kind]
        received = where[receive, self.stage, self.microbatch]
        received[receive < 0] = -1
        for which in (0, 1):
            kind, offset = _NEED_KIND[self.kind, which], _NEED_OFFSET[self.kind, which]
            stage = self.stage + offset
            inside = (kind >= 0) & (stage >= 0) & (stage < stages)
            cell = (kind * stages + stage) * microbatches + self.microbatch
            rows = where.ravel()[np.where(inside, cell, 0)]
            rows = np.where((offset != 0) & (received >= 0), received, rows)
            needed[:, which] = np.where(inside, rows, -1)
        return needed

    def inputs(self, needed: Ints) -> tuple[Ints, Ints]:
        """Per row, the step that it needs from another stage (one at most); and, where it leads
        a fused pair, the one that its other half needs. As leading rows, -1 for none.

        needed: as `needs` gives it.
        """
        first, second = (
            np.where(_NEED_OFFSET[self.kind, which] != 0, needed[:, which], -1) for which in (0, 1)
        )
        own = np.maximum(first, second)
        own = np.where(own >= 0, self.lead[own], -1)
        return own, np.where(self.joined, np.roll(own, -1), -1)

    def step(self, row: int) -> Step:
        """The step that this row leads."""
        action = self.action(row)
        return FusedPair(action, self.action(row + 1)) if self.joined[row] else action

    def action(self, row: int) -> Action:
        return Action(KINDS[self.kind[row]], int(self.stage[row]), int(self.microbatch[row]))


def _actions(step: Step) -> tuple[Action, ...]:
    # Unlike `flatten`, takes anything: what is not a pair is judged by the caller.
    return step if type(step) is FusedPair else (step,)  # type: ignore[return-value]


def _not_a_step(orders: tuple[tuple[Step, ...], ...]) -> ScheduleError:
    rank, position, step = next(
        (rank, position, step)
        for rank, order in enumerate(orders)
        for position, step in enumerate(order)
        if not all(map(_is_action, _actions(step)))
    )
    return ScheduleError(
        "orders are made of Action(Kind, stage, microbatch) with whole numbers, and of FusedPair",
        f"rank {rank} has {step!r:.80} at position {position}",
        "build it from Action and FusedPair, or read it with parse_step",
        rank=rank,
        position=position,
    )


def _is_action(thing: object) -> bool:
    if type(thing) is not Action or [type(part) for part in thing] != [Kind, int, int]:
        return False
    return all(abs(number) < 2**63 for number in thing[1:])
