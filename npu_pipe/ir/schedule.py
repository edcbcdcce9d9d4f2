"""Schedule: per rank, the order of its compute; and where each stage lies."""

from __future__ import annotations

from dataclasses import dataclass

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
    mirrored: microbatches that run through the second replica of the model, whose stage s
        lies on rank p-1-placement[s] (DualPipe, Chimera); empty for all other schedules.
    training: False for evaluation, which has forwards only.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    orders: tuple[tuple[Step, ...], ...]
    mirrored: tuple[int, ...] = ()
    training: bool = True

    @property
    def ranks(self) -> int:
        return len(self.orders)

    @property
    def stages(self) -> int:
        return len(self.placement)

    def rank_of(self, action: Action) -> int:
        """The rank that runs this action."""
        rank = self.placement[action.stage]
        return self.ranks - 1 - rank if action.microbatch in self.mirrored else rank

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages whose parameters this rank holds, in forward order."""
        homes = {rank, self.ranks - 1 - rank} if self.mirrored else {rank}
        return tuple(s for s, home in enumerate(self.placement) if home in homes)
