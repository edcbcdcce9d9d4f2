"""Costs: what each action takes, per stage and boundary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from npu_pipe.errors import CostsError
from npu_pipe.ir.schedule import Schedule

__all__ = ["Costs"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Times in one unit of your choice; microseconds where they meet measured timelines.

    forward, input_grad, weight_grad: per stage, the time of F, I and W; B takes I plus W, a
        fused pair F plus B.
    transfer: per boundary s -> s+1, the time of one crossing, either way. A boundary between
        two stages of one rank costs nothing whatever is given here.
    microbatch_scale: multiplies all times of a microbatch; empty means 1 for all.
    overlapped: True if transfers run beside compute; False if they occupy both ranks.

    Sequences of any kind are taken and kept as tuples. Raises CostsError when their lengths do
    not fit or a value is negative or not finite.
    """

    forward: Sequence[float]
    input_grad: Sequence[float]
    weight_grad: Sequence[float]
    transfer: Sequence[float]
    microbatch_scale: Sequence[float] = ()
    overlapped: bool = True

    def __post_init__(self) -> None:
        for field in ("forward", "input_grad", "weight_grad", "transfer", "microbatch_scale"):
            values = getattr(self, field)
            try:
                numbers = tuple(float(value) for value in values)
            except (TypeError, ValueError, OverflowError) as error:
                raise CostsError(
                    "costs are sequences of numbers, one a stage or boundary",
                    f"{field} is {values!r:.80}",
                    "give a list; Costs.uniform makes equal ones",
                ) from error
            for index, number in enumerate(numbers):
                if not (math.isfinite(number) and number >= 0):
                    raise CostsError(
                        "costs are finite and not negative",
                        f"{field}[{index}] is {number}",
                        "measure it again",
                    )
            object.__setattr__(self, field, numbers)
        stages = self.stages
        if not stages:
            raise CostsError(
                "costs are given for at least one stage", "forward is empty", "give its times"
            )
        for field, length in (
            ("input_grad", stages),
            ("weight_grad", stages),
            ("transfer", stages - 1),
        ):
            if len(getattr(self, field)) != length:
                raise CostsError(
                    "costs give one forward, input_grad and weight_grad a stage and one transfer "
                    "a boundary between stages",
                    f"forward has {stages}, {field} has {len(getattr(self, field))}",
                    f"give {length} values for {field}",
                )

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
        if self.microbatch_scale and len(self.microbatch_scale) != schedule.microbatches:
            raise CostsError(
                "microbatch_scale has one factor a microbatch, or none",
                f"the schedule has {schedule.microbatches} microbatches, the costs "
                f"{len(self.microbatch_scale)}",
                f"give {schedule.microbatches} factors",
            )
