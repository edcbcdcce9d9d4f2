"""Times as whole numbers, for a solver."""

from __future__ import annotations

import math
from dataclasses import dataclass

from npu_pipe.planner.problem import Problem

__all__ = ["Grid", "make_grid"]

_STEPS = 2_000_000  # in a makespan, about
_PLAIN = (1, 2, 4, 8, 16, 10, 20, 100, 1000, 10_000)


@dataclass(frozen=True, slots=True)
class Grid:
    """scale: steps a unit of time. is_exact: whether all times are whole numbers of steps."""

    scale: float
    is_exact: bool

    def floor(self, time: float) -> int:
        """Steps, rounded down: what takes no longer bounds what takes longer."""
        steps = time * self.scale
        nearest = round(steps)
        return nearest if abs(steps - nearest) < 1e-6 else math.floor(steps)

    def slack(self, problem: Problem) -> float:
        """How much rounding can take off the longest way through a schedule."""
        return 0.0 if self.is_exact else (len(problem) + problem.stages) / self.scale


def make_grid(problem: Problem, horizon: float) -> Grid:
    """The coarsest plain grid that holds all times exactly, else a fine one."""
    times = {*problem.duration, *problem.delay, *problem.offset}
    for scale in _PLAIN:
        if scale * horizon <= _STEPS and all(
            abs(time * scale - round(time * scale)) < 1e-9 * max(1.0, abs(time) * scale)
            for time in times
        ):
            return Grid(float(scale), True)
    return Grid(_STEPS / (horizon or 1.0), False)
