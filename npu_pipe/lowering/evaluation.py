"""The forward-only schedule of a schedule, for evaluation."""

from __future__ import annotations

from dataclasses import replace

from npu_pipe.ir.action import Kind, flatten
from npu_pipe.ir.schedule import Schedule

__all__ = ["forward_only"]


def forward_only(schedule: Schedule) -> Schedule:
    """Each rank's forwards, in their order. A part of an order that can run can run."""
    return replace(
        schedule,
        training=False,
        orders=tuple(
            tuple(action for step in order for action in flatten(step) if action.kind is Kind.F)
            for order in schedule.orders
        ),
    )
