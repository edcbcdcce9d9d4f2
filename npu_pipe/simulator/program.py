"""Predict when each action and transfer of a program runs.

Compute goes in order. Transfers run beside it, each lane in the program's order:

    rank 0  | 0F0 | 0F1 |           a send is issued when its producer ends;
    lane        |>>>>|>>>>|         the n-th receive of a lane is posted when its rank begins to
    rank 1           | 1F0 | 1F1 |  use an input of that lane for the (n - prefetch)-th time

A transfer begins when both of its ends are there and the one before it between the two ranks
has ended, and lasts as long as the boundary costs. With costs that are not overlapped it
occupies both ranks instead, from when both stand at it.

The proof of a program gives an order in which everything comes after what it waits for, so one
pass gives all times.
"""

from __future__ import annotations

from itertools import compress

import numpy as np
import numpy.typing as npt

from npu_pipe.ir.deadlock import ProgramProof, prove_program
from npu_pipe.ir.program import Program
from npu_pipe.simulator.costs import Costs
from npu_pipe.simulator.simulate import Clock, durations, spans
from npu_pipe.timeline.timeline import Timeline

__all__ = ["simulate_program"]

Ints = npt.NDArray[np.int64]


def simulate_program(program: Program, costs: Costs) -> Timeline:
    """The predicted timeline of compute and transfers.

    Raises ScheduleError for a program that is wrong and CostsError for costs that do not fit.
    """
    proof = prove_program(program)
    costs.check_fits(program.schedule)
    length = durations(proof.table, costs).tolist()
    if costs.overlapped:
        clock = _overlapped(proof, length, program.prefetch)
    else:
        clock = _blocking(proof, length)
    everything = spans(proof.table, program.orders, clock)
    is_compute = proof.table.is_compute[proof.table.step_rows()]
    return Timeline(
        program.schedule,
        compute=tuple(compress(everything, is_compute.tolist())),
        transfers=tuple(compress(everything, (~is_compute).tolist())),
    )


def _overlapped(proof: ProgramProof, length: list[float], prefetch: int) -> Clock:
    """Transfers run beside compute."""
    table, ranks = proof.table, len(proof.table.starts) - 1
    rank_of, peer = table.rank.tolist(), proof.peer.tolist()
    inputs, partner_inputs = (rows.tolist() for rows in table.inputs(proof.needed))
    producer = table.lead[proof.needed[:, 0]].tolist()
    # Lanes are numbered 2 * rank + (1 for down), apart for what a rank sends and receives.
    there = table.rank[proof.peer]
    down = np.where(table.is_receive, table.rank > there, there > table.rank)
    lane_of = (2 * table.rank + down).tolist()
    issued = [0.0] * (2 * ranks)  # per lane: when its last send was issued
    received = [0] * (2 * ranks)  # per lane: how many receives were posted
    used: list[list[float]] = [[] for _ in range(2 * ranks)]  # per lane: when uses began
    free: dict[tuple[int, int], float] = {}  # per pair of ranks: when its last transfer ended
    clock = [0.0] * ranks
    start, end = [0.0] * len(table), [0.0] * len(table)
    for row in proof.order:
        other = peer[row]
        if other < 0:
            rank = rank_of[row]
            at = clock[rank]
            gets = [get for get in (inputs[row], partner_inputs[row]) if get >= 0]
            for get in gets:
                at = max(at, end[get])
            for get in gets:
                if peer[get] >= 0:
                    used[lane_of[get]].append(at)
            start[row] = at
            clock[rank] = end[row] = at + length[row]
        else:
            out, into = lane_of[row], lane_of[other]
            issued[out] = max(issued[out], end[producer[row]])
            turn = received[into] - prefetch
            posted = used[into][turn] if turn >= 0 else 0.0
            received[into] += 1
            link = (rank_of[row], rank_of[other])
            at = max(issued[out], posted, free.get(link, 0.0))
            start[row] = start[other] = at
            free[link] = end[row] = end[other] = at + length[row]
    return _per_row(proof, start, end)


def _blocking(proof: ProgramProof, length: list[float]) -> Clock:
    """A transfer occupies both of its ranks. The order of each rank settles every need."""
    table = proof.table
    rank_of, peer = table.rank.tolist(), proof.peer.tolist()
    clock = [0.0] * (len(table.starts) - 1)
    start, end = [0.0] * len(table), [0.0] * len(table)
    for row in proof.order:
        other = peer[row] if peer[row] >= 0 else row
        here, there = rank_of[row], rank_of[other]
        start[row] = start[other] = max(clock[here], clock[there])
        clock[here] = clock[there] = end[row] = end[other] = start[row] + length[row]
    return _per_row(proof, start, end)


def _per_row(proof: ProgramProof, start: list[float], end: list[float]) -> Clock:
    lead = proof.table.lead
    return Clock(np.array(start)[lead], np.array(end)[lead])
