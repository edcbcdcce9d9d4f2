"""The forward-only schedule of a schedule, for evaluation."""

from __future__ import annotations

from dataclasses import replace

from npu_pipe.ir.action import Action, Kind, flatten
from npu_pipe.ir.schedule import Schedule

__all__ = ["forward_only"]


def forward_only(schedule: Schedule) -> Schedule:
    """Each rank's forwards, in their order. A part of an order that can run can run.

    Of two replicas the first runs all: the outputs are then on one rank. Its microbatches come
    one after the other, each through the stages of a rank in their order.
    """
    orders = tuple(
        tuple(action for step in order for action in flatten(step) if action.kind is Kind.F)
        for order in schedule.orders
    )
    if schedule.mirrored:
        orders = tuple(
            tuple(
                Action(Kind.F, stage, microbatch)
                for microbatch in range(schedule.microbatches)
                for stage, home in enumerate(schedule.placement)
                if home == rank
            )
            for rank in range(schedule.ranks)
        )
    return replace(schedule, training=False, orders=orders, mirrored=())
