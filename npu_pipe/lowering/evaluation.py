"""The forward-only schedule of a schedule, for evaluation."""

from __future__ import annotations

from dataclasses import replace

from npu_pipe.ir.action import Action, Kind, flatten
from npu_pipe.ir.schedule import Schedule

__all__ = ["forward_only"]


def forward_only(schedule: Schedule, microbatches: int | None = None) -> Schedule:
    """Each rank's forwards, of as many microbatches as the schedule has unless told otherwise.

    In the schedule's own order: a part of an order that can run can run. For another number, the
    microbatches go in groups of p through one stage of a rank after the other, as interleaved
    schedules do it; what a forward needs stands before it in such an order of all ranks.
    Of two replicas the first runs all: the outputs are then on one rank.
    """
    if schedule.mirrored or microbatches not in (None, schedule.microbatches):
        count = microbatches or schedule.microbatches
        orders = tuple(
            tuple(
                Action(Kind.F, stage, microbatch)
                for group in range(0, count, schedule.ranks)
                for stage, home in enumerate(schedule.placement)
                for microbatch in range(group, min(group + schedule.ranks, count))
                if home == rank
            )
            for rank in range(schedule.ranks)
        )
        return replace(schedule, training=False, microbatches=count, orders=orders, mirrored=())
    orders = tuple(
        tuple(action for step in order for action in flatten(step) if action.kind is Kind.F)
        for order in schedule.orders
    )
    return replace(schedule, training=False, orders=orders)
