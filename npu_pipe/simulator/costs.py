"""Costs: what each action takes, per stage and boundary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from npu_pipe.errors import CostsError
from npu_pipe.ir.schedule import Schedule
from npu_pipe.simulator.numbers import read_costs, require_factors, require_length

__all__ = ["Costs"]

_PER_STAGE = ("forward", "input_grad", "weight_grad", "recompute")


@dataclass(frozen=True, slots=True)
class Costs:
    """Times in one unit of your choice; microseconds where they meet measured timelines.

    forward, input_grad, weight_grad: per stage, the time of F, I and W; B takes I plus W.
    transfer: per boundary s -> s+1, the time of one crossing, either way. A boundary between
        two stages of one rank costs nothing whatever is given here.
    microbatch_scale: multiplies all times of a microbatch; empty means 1 for all.
    overlapped: True if transfers run beside compute; False if they occupy both ranks.
    recompute: per stage, the time to run its forward again before its B or I; empty for none.
    fused_ratio: a fused pair takes this share of its F plus its B; 1 if nothing overlaps in it.

    Sequences of any kind are taken and kept as tuples. Raises CostsError when their lengths do
    not fit or a value is negative or not finite.
    """

    forward: Sequence[float]
    input_grad: Sequence[float]
    weight_grad: Sequence[float]
    transfer: Sequence[float]
    microbatch_scale: Sequence[float] = ()
    overlapped: bool = True
    recompute: Sequence[float] = ()
    fused_ratio: float = 1.0

    def __post_init__(self) -> None:
        for field in (*_PER_STAGE, "transfer", "microbatch_scale"):
            object.__setattr__(self, field, read_costs(field, getattr(self, field)))
        (ratio,) = read_costs("fused_ratio", (self.fused_ratio,))
        object.__setattr__(self, "fused_ratio", ratio)
        if not self.stages:
            raise CostsError(
                "costs are given for at least one stage", "forward is empty", "give its times"
            )
        for field in _PER_STAGE:
            if field != "recompute" or self.recompute:
                require_length(field, getattr(self, field), self.stages, stages=self.stages)
        require_length("transfer", self.transfer, self.stages - 1, stages=self.stages)

    @classmethod
    def uniform(
        cls,
        stages: int,
        *,
        forward: float = 1,
        input_grad: float = 1,
        weight_grad: float = 1,
        transfer: float = 0,
    ) -> Costs:
        """Equal costs for all stages and all boundaries."""
        return cls(
            forward=(forward,) * stages,
            input_grad=(input_grad,) * stages,
            weight_grad=(weight_grad,) * stages,
            transfer=(transfer,) * max(stages - 1, 0),
        )

    @property
    def stages(self) -> int:
        return len(self.forward)

    def check_fits(self, schedule: Schedule) -> None:
        """Raise CostsError unless these are costs for this schedule."""
        if self.stages != schedule.stages:
            raise CostsError(
                "costs are given for each stage of the schedule",
                f"the schedule has {schedule.stages} stages, the costs have {self.stages}",
                f"give {schedule.stages} values, as in Costs.uniform({schedule.stages})",
            )
        require_factors(self.microbatch_scale, schedule.microbatches)
