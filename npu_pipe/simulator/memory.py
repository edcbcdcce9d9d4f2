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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from npu_pipe.errors import CostsError
from npu_pipe.ir.action import Action, Kind, flatten
from npu_pipe.ir.check import check_schedule
from npu_pipe.ir.plan import RankPlan, rank_plan
from npu_pipe.ir.program import Program
from npu_pipe.ir.schedule import Schedule
from npu_pipe.simulator.numbers import read_costs, require_factors, require_length
from npu_pipe.timeline.levels import Levels, Unit

__all__ = ["Memory", "Peak", "memory_levels", "peak_memory"]


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
        require_factors(self.microbatch_scale, schedule.microbatches)

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
    peaks = []
    for track in _tracks(subject, memory):
        peak, at = track.parameters, None
        for action, during, _ in track.levels:
            if during > peak:
                peak, at = during, action
        peaks.append(Peak(track.rank, peak, track.parameters, at))
    return tuple(peaks)


def memory_levels(subject: Schedule | Program, memory: Memory) -> Levels:
    """What each rank holds step by step, in the order of its timeline's spans; otherwise as
    `peak_memory`. A fused pair holds what its halves hold at most."""
    schedule = subject.schedule if isinstance(subject, Program) else subject
    before, during, after = [], [], []
    for track, order in zip(_tracks(subject, memory), schedule.orders, strict=True):
        levels = iter(track.levels)
        before.append(track.before)
        for step in order:
            parts = [next(levels) for _ in flatten(step)]
            during.append(max(part[1] for part in parts))
            after.append(parts[-1][2])
    return Levels(Unit.BYTES, tuple(before), tuple(during), tuple(after))


class _Track(NamedTuple):
    """Bytes of a rank: before its first action; then by action, during it and after it."""

    rank: int
    parameters: float
    before: float
    levels: list[tuple[Action, float, float]]


def _tracks(subject: Schedule | Program, memory: Memory) -> Iterator[_Track]:
    schedule = subject.schedule if isinstance(subject, Program) else subject
    check_schedule(schedule)
    memory.check_fits(schedule)
    program = subject if isinstance(subject, Program) else Program(schedule, schedule.orders)
    counts_buffers = isinstance(subject, Program)
    for rank in range(schedule.ranks):
        plan = rank_plan(program, rank)
        yield _track(plan, schedule, memory, counts_buffers=counts_buffers)


def _track(plan: RankPlan, schedule: Schedule, memory: Memory, *, counts_buffers: bool) -> _Track:
    def buffers(*transfers: Action) -> float:
        if not counts_buffers:
            return 0.0
        return sum(
            memory.scaled(memory.boundary[_boundary(each)], each.microbatch) for each in transfers
        )

    parameters = sum(memory.parameters[stage] for stage in schedule.stages_of(plan.rank))
    before = held = parameters + buffers(*plan.first_posts)
    levels = []
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
        during = held
        if kind in (Kind.I, Kind.B) or not schedule.training:
            held -= activation
        if kind is Kind.W:
            held -= weight_inputs
        held -= buffers(*(each for each in todo.releases if each.kind is Kind.RECV_B))
        levels.append((todo.action, during, held))
    return _Track(plan.rank, parameters, before, levels)


def _boundary(transfer: Action) -> int:
    """The stage before the boundary that a transfer crosses."""
    return transfer.stage if transfer.kind in (Kind.SEND_F, Kind.RECV_B) else transfer.stage - 1
