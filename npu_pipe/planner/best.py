"""The best orders so far, and how good they are."""

from __future__ import annotations

from dataclasses import dataclass

from npu_pipe.planner.problem import Orders, Problem

__all__ = ["TOUCH", "Best"]

TOUCH = 1e-9  # relative: what floating point makes of equal times


@dataclass(frozen=True, slots=True)
class Best:
    """value: the objective. bound: nothing is below it. slack: by how much rounding may have
    set the bound too low."""

    problem: Problem
    orders: Orders
    value: float
    bound: float
    slack: float = 0.0

    @property
    def goal(self) -> float:
        """A value that there is no use in going below."""
        return self.bound * (1 + TOUCH) + self.slack

    @property
    def is_met(self) -> bool:
        return self.value <= self.goal
