"""Play all ranks together: an order in which nobody waits, or the circle in which all do.

A rank goes on until it needs something that is not there yet, and is woken when it is. What
blocks one rank never blocks another for good, so the outcome does not depend on who goes first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from npu_pipe.errors import DeadlockError
from npu_pipe.ir.needs import Table

__all__ = ["clock_order", "meeting_order", "run_order"]

Ints = npt.NDArray[np.int64]


def run_order(table: Table, needed: Ints) -> list[int]:
    """The leading rows of a table of compute, in an order in which every need comes first.

    What a rank needs of itself has to stand before already. Raises DeadlockError.
    """
    first, second = (column.tolist() for column in table.inputs(needed))
    width = (table.joined + 1).tolist()
    head, ends = table.starts[:-1].tolist(), table.starts[1:].tolist()
    done = bytearray(len(table) + 1)
    done[-1] = 1  # what row -1, no need, finds
    waiting: dict[int, list[int]] = {}
    order: list[int] = []
    ready = list(range(len(head)))
    while ready:
        rank = ready.pop()
        row, end = head[rank], ends[rank]
        while row < end:
            if not (done[first[row]] and done[second[row]]):
                need = second[row] if done[first[row]] else first[row]
                waiting.setdefault(need, []).append(rank)
                break
            order.append(row)
            done[row] = 1
            if row in waiting:
                ready += waiting.pop(row)
            row += width[row]
        head[rank] = row
    stuck = {rank: row for rank, row in enumerate(head) if row < ends[rank]}
    if stuck:
        waits = {rank: need for need, ranks in waiting.items() for rank in ranks}
        raise _deadlock(table, stuck, waits)
    return order


def meeting_order(table: Table, peer: Ints) -> Ints:
    """The leading rows of a table with transfers, played with the hardest rule there is: a rank
    does one thing at a time, and both ends of a transfer have to stand at it.

    peer: per row, the other end of a transfer, -1 for compute. Of a transfer the order has the
    SEND only. Raises DeadlockError.
    """
    rows = np.flatnonzero(peer >= 0)  # compute never blocks: only transfers are played
    others, rank_of = np.searchsorted(rows, peer[rows]).tolist(), table.rank[rows].tolist()
    bounds = np.searchsorted(rows, table.starts).tolist()
    head, ends = bounds[:-1], bounds[1:]
    met: list[int] = []
    ready = list(range(len(head)))
    while ready:
        rank = ready.pop()
        at, end = head[rank], ends[rank]
        while at < end:
            other = others[at]
            there = rank_of[other]
            if head[there] != other:
                break
            head[there] = other + 1
            ready.append(there)
            met.append(at)
            at += 1
        head[rank] = at
    stuck = {rank: int(rows[at]) for rank, at in enumerate(head) if at < ends[rank]}
    if stuck:
        raise _deadlock(table, stuck, {rank: int(peer[row]) for rank, row in stuck.items()})
    # Compute follows the transfer before it on its rank.
    turn = np.zeros(len(table), dtype=np.int64)
    turn[rows[met]] = turn[peer[rows[met]]] = np.arange(1, len(met) + 1)
    above = table.rank * (len(met) + 1)
    turn = np.maximum.accumulate(turn + above) - above
    steps, is_compute = table.step_rows(), table.is_compute
    listed = steps[~table.is_receive[steps]]
    key = 2 * turn[listed] + is_compute[listed]
    return listed[np.argsort(key, kind="stable")]


def clock_order(table: Table, peer: Ints, clock: Ints) -> Ints | None:
    """An order as `meeting_order` finds one, by a clock that is there already; None if it is wrong.

    clock: per row a number that grows along each rank, the same at both ends of a transfer. Of all
    that is not done yet, what has the least can run then: everything before it is done.
    """
    steps = table.step_rows()
    grows = (np.diff(clock[steps]) > 0) | (np.diff(table.rank[steps]) > 0)
    if not (grows.all() and ((clock[peer] == clock) | (peer < 0)).all()):
        return None
    listed = steps[~table.is_receive[steps]]
    return listed[np.argsort(clock[listed], kind="stable")]


def _deadlock(table: Table, stuck: dict[int, int], waits: dict[int, int]) -> DeadlockError:
    """The error for ranks that stand at row stuck[rank] and wait for row waits[rank]."""
    rank, seen = next(iter(stuck)), []
    while rank not in seen:
        seen.append(rank)
        rank = int(table.rank[waits[rank]])
    ring = seen[seen.index(rank) :]
    story = ", ".join(
        f"rank {rank} at position {table.position[stuck[rank]]} waits in "
        f"{table.step(stuck[rank])} for {table.step(waits[rank])} of rank "
        f"{table.rank[waits[rank]]} at position {table.position[waits[rank]]}"
        for rank in ring
    )
    cycle = tuple((rank, str(table.step(stuck[rank]))) for rank in ring)
    return DeadlockError(
        "ranks may not wait for each other in a circle",
        story,
        "move one of these actions before the one that is waited for; lower() orders transfers "
        "so that this cannot happen",
        cycle=cycle,
        rank=ring[0],
        position=int(table.position[stuck[ring[0]]]),
        action=cycle[0][1],
    )
