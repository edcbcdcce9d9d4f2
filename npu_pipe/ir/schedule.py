"""Schedule: per rank, the order of its compute; and where each stage lies."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from npu_pipe.ir.action import Action, Step

__all__ = ["Schedule"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who computes what, in which order. Transfers are not in it: `lower` places them.

    A Schedule is only data and may be wrong; `check` proves it or says where it is wrong.

    name: the rule it came from, for people; not part of what runs.
    microbatches: m, numbered 0..m-1.
    placement: stage -> rank.
    orders: per rank, its steps (F, B, I, W or a fused pair of F and B).
    mirrored: in ascending order, the microbatches that run through the second replica of the
        model, whose stage s lies on rank p-1-placement[s] (DualPipe, Chimera); else empty.
    training: False for evaluation, which has forwards only.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    orders: tuple[tuple[Step, ...], ...]
    mirrored: tuple[int, ...] = ()
    training: bool = True
    # What `check` found out, kept by it: neither it nor the rest ever changes.
    _proof: object = field(default=None, init=False, repr=False, compare=False)

    @property
    def ranks(self) -> int:
        return len(self.orders)

    @property
    def stages(self) -> int:
        return len(self.placement)

    def rank_of(self, action: Action) -> int:
        """The rank that runs this action."""
        rank = self.placement[action.stage]
        at = bisect_left(self.mirrored, action.microbatch)
        is_mirrored = self.mirrored[at : at + 1] == (action.microbatch,)
        return self.ranks - 1 - rank if is_mirrored else rank

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages whose parameters this rank holds, in forward order."""
        homes = {rank, self.ranks - 1 - rank} if self.mirrored else {rank}
        return tuple(s for s, home in enumerate(self.placement) if home in homes)
