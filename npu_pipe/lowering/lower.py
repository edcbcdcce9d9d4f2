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

import numpy as np
import numpy.typing as npt

from npu_pipe.ir.action import Action, Step
from npu_pipe.ir.bulk import make_all
from npu_pipe.ir.check import Proof, at_row, prove_schedule
from npu_pipe.ir.deadlock import check_prefetch, check_program, transfers_of
from npu_pipe.ir.needs import KINDS
from npu_pipe.ir.program import Program
from npu_pipe.ir.schedule import Schedule
from npu_pipe.simulator.costs import Costs
from npu_pipe.simulator.simulate import Clock, tick

__all__ = ["lower"]

Ints = npt.NDArray[np.int64]


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
    orders = _place(schedule, proof, tick(proof, costs), prefetch)
    program = Program(schedule, orders, prefetch)
    check_program(program)
    return program


def _place(
    schedule: Schedule, proof: Proof, clock: Clock, prefetch: int
) -> tuple[tuple[Step, ...], ...]:
    table = proof.table
    start, end = clock.start, clock.end
    # The turn in an order of needs breaks ties between equal times, which zero costs make.
    turn = np.empty(len(table), dtype=np.int64)
    turn[proof.order] = np.arange(len(proof.order))
    turn = turn[table.lead]

    producer, kind, stage, target, source_rank, target_rank = transfers_of(schedule, table)
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
    # action opened are told apart by their number.
    steps = table.step_rows()
    time = np.concatenate((start[steps], at, at))
    width = len(producer) + 1
    turns = turns * width + np.arange(1, width)
    turns = np.concatenate((turn[steps] * width, turns, turns))
    rank = np.concatenate((table.rank[steps], source_rank, target_rank))
    order = np.lexsort((turns, time, rank)).tolist()

    compute = [step for order in schedule.orders for step in order]
    sends = _transfers(kind, stage, microbatch)
    receives = _transfers(kind + 1, target, microbatch)  # RECV_F follows SEND_F in Kind
    everything: list[Step] = [*compute, *sends, *receives]
    placed = list(map(everything.__getitem__, order))
    cuts = np.searchsorted(rank[order], np.arange(schedule.ranks + 1)).tolist()
    return tuple(tuple(placed[cuts[r] : cuts[r + 1]]) for r in range(schedule.ranks))


def _transfers(kind: Ints, stage: Ints, microbatch: Ints) -> list[Action]:
    kinds = map(KINDS.__getitem__, kind.tolist())
    return make_all(Action, kinds, stage.tolist(), microbatch.tolist())


_F, _I = (KINDS.index(kind) for kind in ("F", "I"))
_SEND_F = KINDS.index("SEND_F")
