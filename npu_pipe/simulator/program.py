"""Predict when each action and transfer of a program runs.

Compute goes in order. Transfers run beside it, each lane in the program's order:

    rank 0  | 0F0 | 0F1 |           a send is issued when its producer ends;
    lane        |>>>>|>>>>|         the n-th receive of a lane is posted when the rank begins to
    rank 1           | 1F0 | 1F1 |  use input n - prefetch of that lane, the first ones at once

A transfer begins when both of its ends are there and the one before it between the two ranks
has ended, and lasts as long as the boundary costs. With costs that are not overlapped it
occupies both ranks instead, from when both stand at it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from npu_pipe.ir.deadlock import check_program
from npu_pipe.ir.needs import KINDS, Table
from npu_pipe.ir.program import Program
from npu_pipe.simulator.costs import Costs
from npu_pipe.simulator.simulate import durations
from npu_pipe.timeline.timeline import Span, Timeline

__all__ = ["simulate_program"]

Ints = npt.NDArray[np.int64]

_IS_RECEIVE = np.array([kind.is_receive for kind in KINDS])
_IS_COMPUTE = np.array([kind.is_compute for kind in KINDS])


def simulate_program(program: Program, costs: Costs) -> Timeline:
    """The predicted timeline of compute and transfers.

    Raises ScheduleError for a program that is wrong and CostsError for costs that do not fit.
    """
    check_program(program)
    costs.check_fits(program.schedule)
    table = Table.of(program.orders)
    needed = table.needs(table.where(program.schedule.stages, program.schedule.microbatches))
    peer = np.full(len(table), -1, dtype=np.int64)
    receives = np.flatnonzero(_IS_RECEIVE[table.kind])
    peer[receives], peer[needed[receives, 0]] = needed[receives, 0], receives
    length = durations(table, costs).tolist()
    if costs.overlapped:
        start, end = _overlapped(program, table, needed, peer.tolist(), length)
    else:
        start, end = _blocking(table, peer.tolist(), length)
    return _timeline(program, table, start, end)


def _overlapped(
    program: Program, table: Table, needed: Ints, peer: list[int], length: list[float]
) -> tuple[list[float], list[float]]:
    """Times per row when transfers run beside compute."""
    rank_of, joined = table.rank.tolist(), table.joined.tolist()
    need_a, need_b = needed[:, 0].tolist(), needed[:, 1].tolist()
    # Lanes are numbered 2 * rank + (1 for down), sends and receives apart.
    is_receive, there = _IS_RECEIVE[table.kind], table.rank[peer]
    down = np.where(is_receive, table.rank > there, there > table.rank)
    lane_of = (2 * table.rank + down).tolist()
    sends: list[list[int]] = [[] for _ in range(2 * len(program.orders))]
    receives: list[list[int]] = [[] for _ in sends]
    compute: list[list[int]] = [[] for _ in program.orders]
    for row, (receive, other) in enumerate(zip(is_receive.tolist(), peer, strict=True)):
        if other < 0:
            compute[rank_of[row]].append(row)
        else:
            (receives if receive else sends)[lane_of[row]].append(row)

    start, end = [0.0] * len(table), [0.0] * len(table)
    known = bytearray(len(table))  # rows whose end is known
    ready_at: dict[int, float] = {}  # one end of a transfer, there before the other
    free: dict[tuple[int, int], float] = {}  # per pair of ranks: when its last transfer ended
    asleep: dict[int, int] = {}  # row of a receive -> the rank that waits for its end
    clock = [0.0] * len(program.orders)
    ready = list(range(len(program.orders)))

    def meet(row: int, at: float) -> None:
        other = peer[row]
        if other not in ready_at:
            ready_at[row] = at
            return
        pair = (min(row, other), max(row, other))
        link = (rank_of[row], rank_of[other]) if row in sent else (rank_of[other], rank_of[row])
        at = max(at, ready_at.pop(other), free.get(link, 0.0))
        free[link] = at + length[row]
        for half in pair:
            start[half], end[half], known[half] = at, free[link], 1
            if half in asleep:
                ready.append(asleep.pop(half))

    sent = {row for queue in sends for row in queue}
    next_send, next_receive = [0] * len(sends), [0] * len(sends)
    for queue in receives:
        for row in queue[: program.prefetch]:
            meet(row, 0.0)
    next_receive = [min(program.prefetch, len(queue)) for queue in receives]
    head = [0] * len(program.orders)
    while ready:
        rank = ready.pop()
        while head[rank] < len(compute[rank]):
            row = compute[rank][head[rank]]
            rows = (row, row + 1) if joined[row] else (row,)
            needs = [need for half in rows for need in (need_a[half], need_b[half]) if need >= 0]
            late = next((need for need in needs if not known[need]), None)
            if late is not None:
                asleep[late] = rank
                break
            at = max(clock[rank], *(end[need] for need in needs), 0.0)
            clock[rank] = at + sum(length[half] for half in rows)
            for half in rows:
                start[half], end[half], known[half] = at, clock[rank], 1
            head[rank] += len(rows)
            for need in needs:
                lane = lane_of[need]
                if peer[need] >= 0 and next_receive[lane] < len(receives[lane]):
                    next_receive[lane] += 1
                    meet(receives[lane][next_receive[lane] - 1], at)
            for lane in (2 * rank, 2 * rank + 1):
                queue = sends[lane]
                while next_send[lane] < len(queue) and known[need_a[queue[next_send[lane]]]]:
                    next_send[lane] += 1
                    send = queue[next_send[lane] - 1]
                    meet(send, end[need_a[send]])
    return start, end


def _blocking(
    table: Table, peer: list[int], length: list[float]
) -> tuple[list[float], list[float]]:
    """Times per row when a transfer occupies both of its ranks.

    The order of the program settles every need: see `check_program`.
    """
    rank_of, joined = table.rank.tolist(), table.joined.tolist()
    head, ends = table.starts[:-1].tolist(), table.starts[1:].tolist()
    start, end = [0.0] * len(table), [0.0] * len(table)
    clock = [0.0] * len(head)
    ready = list(range(len(head)))
    while ready:
        rank = ready.pop()
        row = head[rank]
        while row < ends[rank]:
            other = peer[row]
            rows: tuple[int, ...] = (row, row + 1) if joined[row] else (row,)
            at = clock[rank]
            if other >= 0:
                there = rank_of[other]
                if head[there] != other:
                    break
                rows, at = (row, other), max(at, clock[there])
                clock[there] = at + length[row]
                head[there] += 1
                ready.append(there)
            clock[rank] = at + (length[row] if other >= 0 else sum(length[r] for r in rows))
            for half in rows:
                start[half], end[half] = at, clock[rank]
            row += 2 if joined[row] else 1
        head[rank] = row
    return start, end


def _timeline(program: Program, table: Table, start: list[float], end: list[float]) -> Timeline:
    compute: list[Span] = []
    transfers: list[Span] = []
    rows = np.flatnonzero(~np.concatenate(([False], table.joined[:-1]))).tolist()
    steps = [step for order in program.orders for step in order]
    is_compute = _IS_COMPUTE[table.kind].tolist()
    for row, step in zip(rows, steps, strict=True):
        span = Span(int(table.rank[row]), step, start[row], end[row])
        (compute if is_compute[row] else transfers).append(span)
    return Timeline(program.schedule, tuple(compute), tuple(transfers))
