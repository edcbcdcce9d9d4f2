"""Predict the memory of each rank, in bytes.

For each stage and microbatch

    F            I                 W
    |-activation-|                      what F keeps for I, the stage's input included
                 |-weight_inputs--|     what I keeps for W; a B needs none of it afterwards

and for each rank, all the time, its parameters with gradients and optimizer state. A program
adds the buffers of its transfers: received but not begun to use, or sent and not known to have
arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from npu_pipe.errors import CostsError
from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.check import check_schedule
from npu_pipe.ir.plan import RankPlan, rank_plan
from npu_pipe.ir.program import Program
from npu_pipe.ir.schedule import Schedule
from npu_pipe.simulator.numbers import read_costs, require_length

__all__ = ["Memory", "Peak", "peak_memory"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes per stage, and per boundary.

    activation: what a forward keeps until its B or I.
    weight_inputs: what an I keeps until its W.
    parameters: parameters, gradients and optimizer state of the stage.
    boundary: per boundary s -> s+1, one value that crosses.
    microbatch_scale: multiplies what belongs to a microbatch; empty means 1 for all.
    Raises CostsError when lengths do not fit or a value is negative or not finite.
    """

    activation: Sequence[float]
    weight_inputs: Sequence[float]
    parameters: Sequence[float]
    boundary: Sequence[float]
    microbatch_scale: Sequence[float] = ()

    def __post_init__(self) -> None:
        for field in self.__slots__:
            object.__setattr__(self, field, read_costs(field, getattr(self, field)))
        stages = len(self.activation)
        for field in ("weight_inputs", "parameters"):
            require_length(field, getattr(self, field), stages, stages=stages)
        require_length("boundary", self.boundary, stages - 1, stages=stages)

    def check_fits(self, schedule: Schedule) -> None:
        """Raise CostsError unless this is the memory of this schedule's stages."""
        if len(self.activation) != schedule.stages:
            raise CostsError(
                "memory is given for each stage of the schedule",
                f"the schedule has {schedule.stages} stages, the memory {len(self.activation)}",
                f"give {schedule.stages} values",
            )
        if self.microbatch_scale and len(self.microbatch_scale) != schedule.microbatches:
            raise CostsError(
                "microbatch_scale has one factor a microbatch, or none",
                f"the schedule has {schedule.microbatches} microbatches, the memory "
                f"{len(self.microbatch_scale)} factors",
                f"give {schedule.microbatches} factors",
            )

    def scaled(self, value: float, microbatch: int) -> float:
        """A value of this memory for one microbatch."""
        return value * self.microbatch_scale[microbatch] if self.microbatch_scale else value


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a rank holds at once.

    total_bytes: all of it; parameter_bytes: the part that is always there.
    action: during which it is reached first; None on a rank that never holds more than parameters.
    """

    rank: int
    total_bytes: float
    parameter_bytes: float
    action: Action | None


def peak_memory(subject: Schedule | Program, memory: Memory) -> tuple[Peak, ...]:
    """The peak of each rank. Raises ScheduleError, CostsError.

    A schedule's peak leaves transfer buffers out.
    """
    schedule = subject.schedule if isinstance(subject, Program) else subject
    check_schedule(schedule)
    memory.check_fits(schedule)
    program = subject if isinstance(subject, Program) else Program(schedule, schedule.orders)
    counts_buffers = isinstance(subject, Program)
    return tuple(
        _peak(rank_plan(program, rank), schedule, memory, counts_buffers=counts_buffers)
        for rank in range(schedule.ranks)
    )


def _peak(plan: RankPlan, schedule: Schedule, memory: Memory, *, counts_buffers: bool) -> Peak:
    parameters = sum(memory.parameters[stage] for stage in schedule.stages_of(plan.rank))
    held = peak = parameters
    at: Action | None = None

    def buffers(*transfers: Action) -> float:
        if not counts_buffers:
            return 0.0
        return sum(
            memory.scaled(memory.boundary[_boundary(each)], each.microbatch) for each in transfers
        )

    held += buffers(*plan.first_posts)
    for todo in plan.instructions:
        kind, stage, microbatch = todo.action
        activation = memory.scaled(memory.activation[stage], microbatch)
        weight_inputs = memory.scaled(memory.weight_inputs[stage], microbatch)
        held += buffers(*todo.posts) - buffers(*todo.ended)
        if kind is Kind.F:
            held += activation
            if todo.takes is not None and todo.is_far_take:
                held -= buffers(todo.takes)  # now counted with the activation
        if kind is Kind.I:
            held += weight_inputs
        if todo.gives is not None and todo.is_far_give:
            held += buffers(todo.gives)
        if held > peak:
            peak, at = held, todo.action
        if kind in (Kind.I, Kind.B) or not schedule.training:
            held -= activation
        if kind is Kind.W:
            held -= weight_inputs
        held -= buffers(*(each for each in todo.releases if each.kind is Kind.RECV_B))
    return Peak(plan.rank, peak, parameters, at)


def _boundary(transfer: Action) -> int:
    """The stage before the boundary that a transfer crosses."""
    return transfer.stage if transfer.kind in (Kind.SEND_F, Kind.RECV_B) else transfer.stage - 1
