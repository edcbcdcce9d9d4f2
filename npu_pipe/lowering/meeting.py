"""The turns of compute and transfers where a transfer occupies both of its ranks.

Played on the clock. A transfer begins when both ranks are free: of several, the one whose input
is used soonest. A rank that could begin a step waits instead for a partner that is free soon:

    rank 0   |  0F3   |..|0SEND_F3|  0F4   |      .. is less than half of 0F4, and to begin that
    rank 1   |   1B0     |1RECV_F3|  1F3   |      would make rank 1 wait longer

Turns count what begins, so of all that is not done yet the first can always run.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import chain

import numpy as np
import numpy.typing as npt

from npu_pipe.ir.needs import Table
from npu_pipe.lowering.crossings import Crossings, Ticks

__all__ = ["meeting_ticks"]

Floats = npt.NDArray[np.float64]

_PATIENCE = 0.5  # of its next step, for which a rank stands still for a partner


def meeting_ticks(table: Table, crossings: Crossings, length: Floats, travel: Floats) -> Ticks:
    """length: per leading row, of its step. travel: per transfer."""
    game = _Game(table, crossings, length, travel)
    game.play()
    compute, transfers = (np.array(turn, dtype=np.int64) for turn in (game.steps, game.transfers))
    return Ticks(compute[table.lead], transfers)


class _Game:
    """The state of one play. Per rank: head, the row of its next step; busy, and free_at if so."""

    def __init__(self, table: Table, crossings: Crossings, length: Floats, travel: Floats) -> None:
        ranks, rows = len(table.starts) - 1, len(table)
        self.length, self.width = length.tolist(), (table.joined + 1).tolist()
        self.head, self.ends = table.starts[:-1].tolist(), table.starts[1:].tolist()
        self.rank = table.rank.tolist()
        self.consumer = table.lead[crossings.consumer].tolist()
        source, target = crossings.source_rank.tolist(), crossings.target_rank.tolist()
        self.pair = list(zip(source, target, strict=True))
        self.travel, self.gate = travel.tolist(), crossings.gate.tolist()
        self.gives: dict[int, list[int]] = {}  # leading row -> transfers
        for transfer, row in enumerate(table.lead[crossings.producer].tolist()):
            self.gives.setdefault(row, []).append(transfer)
        self.missing = np.bincount(self.consumer, minlength=rows).tolist()
        # Per pair of ranks and direction, what waits to cross: by the row that takes it.
        self.waiting: dict[tuple[int, int], list[tuple[int, int]]] = {p: [] for p in self.pair}
        self.links = [[pair for pair in self.waiting if rank in pair] for rank in range(ranks)]
        self.near = [{rank, *chain(*self.links[rank])} for rank in range(ranks)]
        self.busy, self.free_at = [False] * ranks, [0.0] * ranks
        self.turn, self.steps, self.transfers = 0, [0] * rows, [0] * len(self.pair)
        self.events: list[tuple[float, int, int, bool]] = []  # end, turn, row or transfer, which

    def play(self) -> None:
        freed, now = set(range(len(self.head))), 0.0
        while True:
            near = {rank for one in freed for rank in self.near[one]}
            awake = sorted(rank for rank in near if not self.busy[rank])
            for _, transfer in sorted(self.possible(awake)):
                source, target = self.pair[transfer]
                if not (self.busy[source] or self.busy[target]):
                    self.begin_transfer(transfer, now)
            for rank in awake:
                if self.may_step(rank, now):
                    self.begin_step(rank, now)
            if not self.events:
                return
            freed, now = set(), self.events[0][0]
            while self.events and self.events[0][0] == now:
                freed |= self.end(*heappop(self.events)[2:])

    def possible(self, awake: list[int]) -> Iterator[tuple[int, int]]:
        """How soon it is needed, and the transfer, of all that can begin."""
        for pair in (pair for rank in awake for pair in self.links[rank]):
            source, target = pair
            if self.is_open(pair) and not (self.busy[source] or self.busy[target]):
                taker, transfer = self.waiting[pair][0]
                yield taker - self.head[target], transfer

    def is_open(self, pair: tuple[int, int]) -> bool:
        """Whether something waits to cross that its receiver has room for."""
        waiting = self.waiting[pair]
        return bool(waiting) and self.gate[waiting[0][1]] < self.head[pair[1]]

    def may_step(self, rank: int, now: float) -> bool:
        row = self.head[rank]
        if self.busy[rank] or row == self.ends[rank] or self.missing[row]:
            return False
        patience = now + _PATIENCE * self.length[row]
        for pair in self.links[rank]:
            if self.is_open(pair):
                other = sum(pair) - rank
                if self.busy[other] and self.free_at[other] < patience:
                    return False
        return True

    def begin_step(self, rank: int, now: float) -> None:
        row = self.head[rank]
        self.steps[row] = self.turn
        self.head[rank] += self.width[row]
        self.begin((rank,), now + self.length[row], row, is_step=True)

    def begin_transfer(self, transfer: int, now: float) -> None:
        pair = self.pair[transfer]
        heappop(self.waiting[pair])
        self.transfers[transfer] = self.turn
        self.begin(pair, now + self.travel[transfer], transfer, is_step=False)

    def begin(self, ranks: tuple[int, ...], end: float, number: int, *, is_step: bool) -> None:
        for rank in ranks:
            self.busy[rank], self.free_at[rank] = True, end
        heappush(self.events, (end, self.turn, number, is_step))
        self.turn += 1

    def end(self, number: int, is_step: bool) -> set[int]:
        """Returns the ranks that are free then."""
        if is_step:
            ranks = {self.rank[number]}
            for transfer in self.gives.get(number, ()):
                entry = (self.consumer[transfer], transfer)
                heappush(self.waiting[self.pair[transfer]], entry)
        else:
            ranks = set(self.pair[number])
            self.missing[self.consumer[number]] -= 1
        for rank in ranks:
            self.busy[rank] = False
        return ranks
