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
of one lane that it has not begun to use. Where transfers occupy their ranks, `meeting` finds
the instants.
"""

from __future__ import annotations

from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from npu_pipe.ir.action import Action, Step
from npu_pipe.ir.bulk import make_all
from npu_pipe.ir.check import Proof, prove_schedule
from npu_pipe.ir.deadlock import Draft, check_prefetch, prove_program
from npu_pipe.ir.needs import KINDS, Table
from npu_pipe.ir.program import Program
from npu_pipe.ir.schedule import Schedule
from npu_pipe.lowering.crossings import Crossings, Ticks, crossings_of
from npu_pipe.lowering.meeting import meeting_ticks
from npu_pipe.simulator.costs import Costs
from npu_pipe.simulator.simulate import arrivals, durations, tick

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
    crossings = crossings_of(schedule, proof.table, prefetch)
    clock = _beside_compute if costs.overlapped else _between_compute
    orders, draft = _in_order(schedule, proof.table, crossings, clock(proof, costs, crossings))
    program = Program(schedule, orders, prefetch)
    prove_program(program, draft)
    return program


def _beside_compute(proof: Proof, costs: Costs, crossings: Crossings) -> Ticks:
    """Transfers take no time of their ranks."""
    table = proof.table
    start, end = tick(proof, costs)
    # The turn in an order of needs breaks ties between equal times, which zero costs make.
    turn = np.empty(len(table), dtype=np.int64)
    turn[proof.order] = np.arange(len(proof.order))
    turn = turn[table.lead]
    at, turns = end[crossings.producer], turn[crossings.producer]
    gate_at, gate_turn = start[crossings.gate], turn[crossings.gate]
    later = (gate_at > at) | ((gate_at == at) & (gate_turn > turns))
    gated = (crossings.gate >= 0) & later
    at, turns = np.where(gated, gate_at, at), np.where(gated, gate_turn, turns)

    # One key for all: time, turn, and a transfer after what opened its way. Transfers that one
    # action opened are told apart by their number; the halves of a pair stay together.
    width = len(at) + 1
    turns = turns * width + np.arange(1, width)
    ticks = _ticks(np.concatenate((start, at)), np.concatenate((turn * width, turns)))
    return Ticks(ticks[: len(table)], ticks[len(table) :])


def _between_compute(proof: Proof, costs: Costs, crossings: Crossings) -> Ticks:
    """Transfers occupy both of their ranks."""
    travel = arrivals(proof, costs).travel[crossings.consumer]
    return meeting_ticks(proof.table, crossings, durations(proof.table, costs), travel)


def _ticks(time: Floats, turns: Ints) -> Ints:
    """Per row a number that grows with its time, then its turn; equal for equal ones."""
    by_clock = np.lexsort((turns, time))
    steps = (np.diff(time[by_clock]) != 0) | (np.diff(turns[by_clock]) != 0)
    ticks = np.zeros(len(time), dtype=np.int64)
    ticks[by_clock[1:]] = np.cumsum(steps)
    return ticks


def _in_order(
    schedule: Schedule, table: Table, crossings: Crossings, ticks: Ticks
) -> tuple[Orders, Draft]:
    """The orders of the program, each rank's by the clock, and what is known about them."""
    _, kind, stage, target, source_rank, target_rank, *_ = crossings
    microbatch = table.microbatch[crossings.producer]
    rank = np.concatenate((table.rank, source_rank, target_rank))
    kinds = np.concatenate((table.kind, kind, kind + 1))  # RECV_F follows SEND_F in Kind
    stages = np.concatenate((table.stage, stage, target))
    microbatches = np.concatenate((table.microbatch, microbatch, microbatch))
    joined = np.concatenate((table.joined, np.zeros(2 * len(kind), dtype=np.bool_)))
    clock = np.concatenate((ticks.compute, ticks.transfers, ticks.transfers))
    order = np.lexsort((clock, rank))
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
    return orders, Draft(placed, clock[order])
