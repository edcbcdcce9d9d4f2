"""Predict when each action runs.

A compute step starts when the one before it on its rank has ended and what it needs is there:

    start = max(end of the step before, end of what it needs + its transfer)

so one pass over the actions, in an order in which every need comes first, gives all times.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from npu_pipe.ir.action import Kind
from npu_pipe.ir.check import check_schedule, run_order
from npu_pipe.ir.needs import KINDS, Table
from npu_pipe.ir.schedule import Schedule
from npu_pipe.simulator.costs import Costs
from npu_pipe.timeline.timeline import Span, Timeline

__all__ = ["Clock", "durations", "simulate_schedule", "tick"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_CODE = {kind: code for code, kind in enumerate(KINDS)}


class Clock(NamedTuple):
    """Start and end per row of a table, and the rows in an order in which needs come first."""

    start: list[float]
    end: list[float]
    order: list[int]


def simulate_schedule(schedule: Schedule, costs: Costs) -> Timeline:
    """The predicted timeline of compute, transfers running beside it.

    Raises ScheduleError for a schedule that is wrong and CostsError for costs that do not fit.
    """
    check_schedule(schedule)
    costs.check_fits(schedule)
    table = Table.of(schedule.orders)
    clock = tick(schedule, table, costs)
    first = ~np.concatenate(([False], table.joined[:-1]))
    rows = np.flatnonzero(first).tolist()
    steps = [step for order in schedule.orders for step in order]
    ranks = table.rank[first].tolist()
    start, end = clock.start, clock.end
    spans = zip(ranks, steps, [start[r] for r in rows], [end[r] for r in rows], strict=True)
    return Timeline(schedule, tuple(map(Span._make, spans)))


def tick(schedule: Schedule, table: Table, costs: Costs) -> Clock:
    """Start and end of each row of a table of compute."""
    where = table.where(schedule.stages, schedule.microbatches)
    order = run_order(table, where)
    needed, joined = table.needs(where), table.joined.tolist()
    wait = _transfer_times(table, needed, costs)
    last = np.concatenate(([-1], np.arange(len(table) - 1)))
    last[table.starts[:-1][np.diff(table.starts) > 0]] = -1
    need_a, need_b = needed[:, 0].tolist(), needed[:, 1].tolist()
    wait_a, wait_b = wait[:, 0].tolist(), wait[:, 1].tolist()
    before, length = last.tolist(), durations(table, costs).tolist()
    start, end = [0.0] * len(table), [0.0] * len(table)
    second_half = False
    for row in order:
        if second_half:  # settled together with the first half of its fused pair
            second_half = False
            continue
        at = end[before[row]] if before[row] >= 0 else 0.0
        rows = (row, row + 1) if joined[row] else (row,)
        for half in rows:
            if need_a[half] >= 0:
                at = max(at, end[need_a[half]] + wait_a[half])
            if need_b[half] >= 0:
                at = max(at, end[need_b[half]] + wait_b[half])
        until = at + sum(length[half] for half in rows)
        for half in rows:
            start[half], end[half] = at, until
        second_half = joined[row]
    return Clock(start, end, order)


def durations(table: Table, costs: Costs) -> Floats:
    """Per row, how long the action or transfer takes."""
    by_kind = np.zeros((len(KINDS), costs.stages))
    by_kind[_CODE[Kind.SEND_F], :-1] = by_kind[_CODE[Kind.RECV_F], 1:] = costs.transfer
    by_kind[_CODE[Kind.SEND_B], 1:] = by_kind[_CODE[Kind.RECV_B], :-1] = costs.transfer
    by_kind[_CODE[Kind.F]] = costs.forward
    by_kind[_CODE[Kind.I]] = costs.input_grad
    by_kind[_CODE[Kind.W]] = costs.weight_grad
    by_kind[_CODE[Kind.B]] = by_kind[_CODE[Kind.I]] + by_kind[_CODE[Kind.W]]
    return by_kind[table.kind, table.stage] * _scale(table, costs)


def _scale(table: Table, costs: Costs) -> Floats:
    if not costs.microbatch_scale:
        return np.ones(len(table))
    return np.array(costs.microbatch_scale)[table.microbatch]


def _transfer_times(table: Table, needed: Ints, costs: Costs) -> Floats:
    """Per row and need, how long what is needed travels: nothing inside a rank."""
    from_stage = table.stage[needed]
    boundary = np.minimum(from_stage, table.stage[:, None])
    far = (needed >= 0) & (table.rank[needed] != table.rank[:, None])
    transfer = np.array([*costs.transfer, 0.0])
    return np.where(far, transfer[boundary] * _scale(table, costs)[:, None], 0.0)
