"""Predict when each action runs.

A compute step starts when the one before it on its rank has ended and what it needs is there:

    start = max(end of the step before, end of what it needs + its transfer)

so one pass over the actions, in an order in which every need comes first, gives all times.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from npu_pipe.ir.action import Kind, Step
from npu_pipe.ir.bulk import make_all
from npu_pipe.ir.check import Proof, prove_schedule
from npu_pipe.ir.needs import KINDS, Table
from npu_pipe.ir.schedule import Schedule
from npu_pipe.simulator.costs import Costs
from npu_pipe.timeline.timeline import Span, Timeline

__all__ = [
    "Arrivals",
    "Clock",
    "arrivals",
    "durations",
    "simulate_schedule",
    "spans",
    "steps_before",
    "tick",
]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_CODE = {kind: code for code, kind in enumerate(KINDS)}


class Clock(NamedTuple):
    """Start and end per row of a table; both halves of a fused pair have those of the pair."""

    start: Floats
    end: Floats


class Arrivals(NamedTuple):
    """Per leading row, the step of another stage that it needs and how long what that gives
    travels; where it leads a fused pair, the same for its other half. -1 and 0 for none."""

    need: Ints
    travel: Floats
    partner_need: Ints
    partner_travel: Floats


def simulate_schedule(schedule: Schedule, costs: Costs) -> Timeline:
    """The predicted timeline of compute, transfers running beside it.

    Raises ScheduleError for a schedule that is wrong and CostsError for costs that do not fit.
    """
    proof = prove_schedule(schedule)
    costs.check_fits(schedule)
    return Timeline(schedule, tuple(spans(proof.table, schedule.orders, tick(proof, costs))))


def tick(proof: Proof, costs: Costs) -> Clock:
    """When each row of a proved schedule runs."""
    table, order = proof.table, np.array(proof.order, dtype=np.int64)
    end_of = np.zeros(len(table) + 1, dtype=np.int64)  # row -> where its end stands below
    end_of[order] = np.arange(1, len(order) + 1)
    need, wait, other, other_wait = arrivals(proof, costs)
    waits = (end_of[steps_before(table)], end_of[need], wait, end_of[other], other_wait)
    columns = (column[order].tolist() for column in (*waits, durations(table, costs)))
    start, end = [0.0], [0.0]  # the first for row -1
    for before, one, travel, two, other_travel, takes in zip(*columns, strict=True):
        at = end[before]
        there = end[one] + travel
        if there > at:
            at = there
        there = end[two] + other_travel
        if there > at:
            at = there
        start.append(at)
        end.append(at + takes)
    ends = end_of[table.lead]
    return Clock(np.array(start)[ends], np.array(end)[ends])


def steps_before(table: Table) -> Ints:
    """Per leading row, the step before it on its rank, -1 for none."""
    steps = table.step_rows()
    before = np.full(len(table), -1)
    before[steps[1:]] = np.where(np.diff(table.rank[steps]) == 0, steps[:-1], -1)
    return before


def arrivals(proof: Proof, costs: Costs) -> Arrivals:
    """What each row of a proved schedule waits for, besides the step before it on its rank."""
    table = proof.table
    inputs, partner_inputs = table.inputs(proof.needed)
    travel = _transfer_times(table, inputs, costs)
    partner_travel = np.where(table.joined, np.roll(travel, -1), 0.0)
    return Arrivals(inputs, travel, partner_inputs, partner_travel)


def spans(table: Table, orders: tuple[tuple[Step, ...], ...], clock: Clock) -> list[Span]:
    """One span a step, rank after rank."""
    rows = table.step_rows()
    columns = (table.rank[rows].tolist(), chain.from_iterable(orders))
    times = (clock.start[rows].tolist(), clock.end[rows].tolist())
    return make_all(Span, *columns, *times)


def durations(table: Table, costs: Costs) -> Floats:
    """Per leading row, how long its step or transfer takes."""
    by_kind = np.zeros((len(KINDS), costs.stages))
    by_kind[_CODE[Kind.SEND_F], :-1] = by_kind[_CODE[Kind.RECV_F], 1:] = costs.transfer
    by_kind[_CODE[Kind.SEND_B], 1:] = by_kind[_CODE[Kind.RECV_B], :-1] = costs.transfer
    by_kind[_CODE[Kind.F]] = costs.forward
    by_kind[_CODE[Kind.I]] = np.add(costs.input_grad, costs.recompute or 0.0)
    by_kind[_CODE[Kind.W]] = costs.weight_grad
    by_kind[_CODE[Kind.B]] = by_kind[_CODE[Kind.I]] + by_kind[_CODE[Kind.W]]
    alone = by_kind[table.kind, table.stage] * _scale(table, costs)
    return np.where(table.joined, (alone + np.roll(alone, -1)) * costs.fused_ratio, alone)


def _scale(table: Table, costs: Costs) -> Floats:
    if not costs.microbatch_scale:
        return np.ones(len(table))
    return np.array(costs.microbatch_scale)[table.microbatch]


def _transfer_times(table: Table, inputs: Ints, costs: Costs) -> Floats:
    """Per row, how long what it needs from another stage travels: nothing inside a rank."""
    boundary = table.stage - (table.kind == _CODE[Kind.F])
    far = (inputs >= 0) & (table.rank[inputs] != table.rank)
    transfer = np.array([*costs.transfer, 0.0])  # no boundary before the first stage either
    return np.where(far, transfer[boundary] * _scale(table, costs), 0.0)
