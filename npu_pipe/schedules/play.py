"""A schedule in the making: played slot after slot, with every action one slot long.

Each stage takes its microbatches in order, so what has run is told by one count per chain, the
actions of one kind on one stage; and of each chain only the next action can be ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.needs import needs

__all__ = ["Play"]

_KINDS = (Kind.F, Kind.I, Kind.W)


class Play:
    """orders: per rank, what has run. held: per rank, the activations from F to W.
    done: per chain (kind, stage), how many have run."""

    def __init__(
        self, placement: tuple[int, ...], microbatches: int, *, begun: Iterable[Iterable[Action]]
    ) -> None:
        """begun: per rank, what has run before the first slot."""
        self.orders = list(map(list, begun))
        self.held = [0] * len(self.orders)
        self.done = {(kind, stage): 0 for kind in _KINDS for stage in range(len(placement))}
        for rank, order in enumerate(self.orders):
            for kind, stage, _ in order:
                self.done[kind, stage] += 1
                self.held[rank] += (kind is Kind.F) - (kind is Kind.W)
        self._microbatches = microbatches
        self._needs = {
            (kind, stage): [need[:2] for need in needs(Action(kind, stage, 0), len(placement))]
            for kind, stage in self.done
        }

    def next(self, kind: Kind, stage: int) -> Action | None:
        """The next action of a chain, if there is one and it can start in this slot."""
        microbatch = self.done[kind, stage]
        if microbatch == self._microbatches:
            return None
        for chain in self._needs[kind, stage]:
            if self.done[chain] <= microbatch:
                return None
        return Action(kind, stage, microbatch)

    def run(self, choose: Callable[[int], Action | None]) -> tuple[tuple[Action, ...], ...]:
        """Play to the end, and return the orders.

        choose: of a rank, what it runs in this slot; asked before any rank runs it.
        """
        ranks = range(len(self.orders))
        left = len(self.done) * self._microbatches - sum(self.done.values())
        while left:
            slot = [choose(rank) for rank in ranks]
            assert any(slot), "some rank can always go on"
            for rank, action in zip(ranks, slot, strict=True):
                if action is not None:
                    kind, stage, _ = action
                    self.orders[rank].append(action)
                    self.done[kind, stage] += 1
                    self.held[rank] += (kind is Kind.F) - (kind is Kind.W)
                    left -= 1
        return tuple(map(tuple, self.orders))
