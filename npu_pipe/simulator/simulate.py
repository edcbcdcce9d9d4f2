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

__all__ = ["Clock", "durations", "simulate_schedule", "spans", "tick"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_CODE = {kind: code for code, kind in enumerate(KINDS)}


class Clock(NamedTuple):
    """Start and end per row of a table; both halves of a fused pair have those of the pair."""

    start: Floats
    end: Floats


def simulate_schedule(schedule: Schedule, costs: Costs) -> Timeline:
    """The predicted timeline of compute, transfers running beside it.

    Raises ScheduleError for a schedule that is wrong and CostsError for costs that do not fit.
    """
    proof = prove_schedule(schedule)
    costs.check_fits(schedule)
    return Timeline(schedule, tuple(spans(proof.table, schedule.orders, tick(proof, costs))))


def tick(proof: Proof, costs: Costs) -> Clock:
    """When each row of a proved schedule runs."""
    table = proof.table
    inputs, partner_inputs = table.inputs(proof.needed)
    travel = _transfer_times(table, inputs, costs)
    need, wait = inputs.tolist(), travel.tolist()
    partner_travel = np.where(table.joined, np.roll(travel, -1), 0.0)
    partner_need, partner_wait = partner_inputs.tolist(), partner_travel.tolist()
    rank_of, length = table.rank.tolist(), durations(table, costs).tolist()
    clock = [0.0] * (len(table.starts) - 1)
    start = [0.0] * len(table)
    end = [0.0] * (len(table) + 1)  # the last for row -1, no need
    for row in proof.order:
        rank = rank_of[row]
        at = clock[rank]
        there = end[need[row]] + wait[row]
        if there > at:
            at = there
        there = end[partner_need[row]] + partner_wait[row]
        if there > at:
            at = there
        start[row] = at
        clock[rank] = end[row] = at + length[row]
    return Clock(np.array(start)[table.lead], np.array(end)[table.lead])


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
