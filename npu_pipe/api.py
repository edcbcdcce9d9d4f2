"""The verbs that take a Schedule or a Program."""

from __future__ import annotations

from npu_pipe.ir.check import check_schedule
from npu_pipe.ir.deadlock import check_program
from npu_pipe.ir.program import Program
from npu_pipe.ir.schedule import Schedule
from npu_pipe.lowering.lower import lower
from npu_pipe.simulator.costs import Costs
from npu_pipe.simulator.program import simulate_program
from npu_pipe.simulator.simulate import simulate_schedule
from npu_pipe.timeline.timeline import Timeline

__all__ = ["check", "simulate"]


def check(subject: Schedule | Program) -> None:
    """Prove a schedule or program; raises ScheduleError with rank, position, action and cure.

    What is proved stands in `npu_pipe.ir.check`, and in `npu_pipe.ir.deadlock` for a program.
    """
    if isinstance(subject, Program):
        check_program(subject)
    else:
        check_schedule(subject)


def simulate(subject: Schedule | Program, costs: Costs) -> Timeline:
    """Predict the timeline of a schedule or program. Raises ScheduleError, CostsError.

    A schedule's transfers are only a delay between ranks; a program's take turns in their lane
    and wait for their receive. Transfers that occupy the ranks have a place only in a program,
    so for those a schedule is lowered first.
    """
    if isinstance(subject, Program):
        return simulate_program(subject, costs)
    if costs.overlapped:
        return simulate_schedule(subject, costs)
    return simulate_program(lower(subject, costs), costs)
