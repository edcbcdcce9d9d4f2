"""Footprint: what ranks were measured to hold, next to what that makes the simulator predict."""

from __future__ import annotations

from dataclasses import dataclass

from npu_pipe.ir.schedule import Schedule
from npu_pipe.simulator.memory import Memory, peak_memory

__all__ = ["Footprint"]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Measured in one window of training; what is received, and optimizer state, left out.

    memory: of one microbatch, per stage and boundary.
    held_bytes: per rank, the most that it held when an action began or had ended: parameters,
        gradients, and what its stages keep, outputs that are still being sent among it.
    highest_bytes: likewise at any moment: with what actions need while they run.
    """

    memory: Memory
    held_bytes: tuple[float, ...]
    highest_bytes: tuple[float, ...]

    def predicted_bytes(self, schedule: Schedule) -> tuple[float, ...]:
        """Per rank, the peak of `held_bytes` that the simulator predicts for this schedule."""
        return tuple(peak.total_bytes for peak in peak_memory(schedule, self.memory))
