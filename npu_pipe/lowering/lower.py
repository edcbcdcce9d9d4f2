"""Schedule -> Program: give each transfer its place.

Placing a transfer next to its producer, as is usually done, deadlocks when sends block: both
neighbours send first. Here the schedule is simulated with the costs, each transfer gets one
instant on a single clock, and every rank keeps the order of that clock:

    clock    0      1        2         3
    rank 0   0F0    0SEND_F0 0F1       0SEND_F1 ...
    rank 1          1RECV_F0 1F0       1RECV_F1 ...      both ends of a transfer share an instant

Of everything not yet done on any rank, the earliest on the clock can always run: what it needs
is earlier, and whoever it meets stands at the same instant. So nothing hangs, with any costs;
wrong costs only make the order slower.

The instant is when the producer ends, but not before the receiver begins the compute that
takes the `prefetch`-th input before this one: a rank never holds more than `prefetch` inputs
of one lane that it has not begun to use.
"""

from __future__ import annotations

from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from npu_pipe.ir.action import Action, Step
from npu_pipe.ir.bulk import make_all
from npu_pipe.ir.check import Proof, at_row, prove_schedule
from npu_pipe.ir.deadlock import Draft, check_prefetch, prove_program, transfers_of
from npu_pipe.ir.needs import KINDS, Table
from npu_pipe.ir.program import Program
from npu_pipe.ir.schedule import Schedule
from npu_pipe.simulator.costs import Costs
from npu_pipe.simulator.simulate import Clock, tick

__all__ = ["lower"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Orders = tuple[tuple[Step, ...], ...]


def lower(schedule: Schedule, costs: Costs | None = None, *, prefetch: int = 2) -> Program:
    """The program of a schedule; proved before it is returned.

    costs: what the clock goes by; None for equal ones (F = I = W).
    prefetch: how many inputs a rank may have received, per lane, and not begun to use (>= 1).
        A fused pair that takes two inputs of one lane, as in DualPipe, needs 2.
    Raises ScheduleError when the schedule is wrong, CostsError when the costs do not fit.
    """
    check_prefetch(prefetch)
    proof = prove_schedule(schedule)
    costs = costs or Costs.uniform(schedule.stages)
    costs.check_fits(schedule)
    orders, draft = _place(schedule, proof, tick(proof, costs), prefetch)
    program = Program(schedule, orders, prefetch)
    prove_program(program, draft)
    return program


def _place(schedule: Schedule, proof: Proof, clock: Clock, prefetch: int) -> tuple[Orders, Draft]:
    """The orders of the program, and what is known about them."""
    table = proof.table
    start, end = clock.start, clock.end
    # The turn in an order of needs breaks ties between equal times, which zero costs make.
    turn = np.empty(len(table), dtype=np.int64)
    turn[proof.order] = np.arange(len(proof.order))
    turn = turn[table.lead]

    producer, kind, _, target, source_rank, target_rank = transfers_of(schedule, table)
    microbatch = table.microbatch[producer]
    where = table.where(schedule.stages, schedule.microbatches)
    consumer = where[np.where(kind == _SEND_F, _F, _I), target, microbatch]
    at, turns = end[producer], turn[producer]
    # The n-th input of a lane waits for the start of the consumer of input n - prefetch.
    lane = target_rank * 2 + (target_rank > source_rank)
    by_use = np.lexsort((consumer, lane))
    ahead = by_use[:-prefetch]
    later = by_use[prefetch:]
    same = lane[ahead] == lane[later]
    ahead, later = ahead[same], later[same]
    for row in consumer[later[table.lead[consumer[ahead]] == table.lead[consumer[later]]]][:1]:
        raise at_row(
            table,
            row,
            "a rank holds all inputs of a step before it begins",
            f"its fused pair takes two of one lane, and prefetch is {prefetch}",
            "give prefetch of at least 2",
        )
    gate_at, gate_turn = start[consumer[ahead]], turn[consumer[ahead]]
    gated = (gate_at > at[later]) | ((gate_at == at[later]) & (gate_turn > turns[later]))
    at[later] = np.where(gated, gate_at, at[later])
    turns[later] = np.where(gated, gate_turn, turns[later])

    # One key for all: time, turn, and a transfer after what opened its way. Transfers that one
    # action opened are told apart by their number; the halves of a pair stay together.
    width = len(producer) + 1
    turns = turns * width + np.arange(1, width)
    ticks = _ticks(np.concatenate((start, at, at)), np.concatenate((turn * width, turns, turns)))
    return _in_order(schedule, table, ticks)


def _ticks(time: Floats, turns: Ints) -> Ints:
    """Per row a number that grows with its time, then its turn; equal for equal ones."""
    by_clock = np.lexsort((turns, time))
    steps = (np.diff(time[by_clock]) != 0) | (np.diff(turns[by_clock]) != 0)
    ticks = np.zeros(len(time), dtype=np.int64)
    ticks[by_clock[1:]] = np.cumsum(steps)
    return ticks


def _in_order(schedule: Schedule, table: Table, ticks: Ints) -> tuple[Orders, Draft]:
    """The compute of a table, the sends and the receives it calls for: each rank's by the clock.

    ticks: of these three in turn, on one clock.
    """
    producer, kind, stage, target, source_rank, target_rank = transfers_of(schedule, table)
    microbatch = table.microbatch[producer]
    rank = np.concatenate((table.rank, source_rank, target_rank))
    kinds = np.concatenate((table.kind, kind, kind + 1))  # RECV_F follows SEND_F in Kind
    stages = np.concatenate((table.stage, stage, target))
    microbatches = np.concatenate((table.microbatch, microbatch, microbatch))
    joined = np.concatenate((table.joined, np.zeros(2 * len(producer), dtype=np.bool_)))
    order = np.lexsort((ticks, rank))
    columns = (column[order] for column in (rank, kinds, stages, microbatches))
    placed = Table.of_rows(schedule.ranks, *columns, joined=joined[order])

    transfers = slice(len(table), None)
    names = map(KINDS.__getitem__, kinds[transfers].tolist())
    numbers = (column[transfers].tolist() for column in (stages, microbatches))
    steps = [*chain.from_iterable(schedule.orders), *make_all(Action, names, *numbers)]
    leads = np.concatenate(([True], ~joined[:-1]))
    step_of = np.cumsum(leads) - 1
    turned = map(steps.__getitem__, step_of[order[leads[order]]].tolist())
    lengths = np.bincount(placed.rank[placed.step_rows()], minlength=schedule.ranks).tolist()
    orders = tuple(tuple(islice(turned, length)) for length in lengths)
    return orders, Draft(placed, ticks[order])


_F, _I = (KINDS.index(kind) for kind in ("F", "I"))
_SEND_F = KINDS.index("SEND_F")
