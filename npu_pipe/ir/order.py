"""Play all ranks together: an order in which nobody waits, or the circle in which all do.

A rank goes on until it needs something that is not there yet, and is woken when it is. What
blocks one rank never blocks another for good, so the outcome does not depend on who goes first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from npu_pipe.errors import DeadlockError
from npu_pipe.ir.needs import Table

__all__ = ["meeting_order", "run_order"]

Ints = npt.NDArray[np.int64]


def run_order(table: Table, needed: Ints) -> list[int]:
    """The leading rows of a table of compute, in an order in which every need comes first.

    What a rank needs of itself has to stand before already. Raises DeadlockError.
    """
    first, second = (column.tolist() for column in table.inputs(needed))
    width = (table.joined + 1).tolist()
    head, ends = table.starts[:-1].tolist(), table.starts[1:].tolist()
    done = bytearray(len(table))
    waiting: dict[int, list[int]] = {}
    order: list[int] = []
    ready = list(range(len(head)))
    while ready:
        rank = ready.pop()
        row, end = head[rank], ends[rank]
        while row < end:
            need = first[row]
            if need < 0 or done[need]:
                need = second[row]
            if need >= 0 and not done[need]:
                waiting.setdefault(need, []).append(rank)
                break
            order.append(row)
            done[row] = 1
            ready += waiting.pop(row, ())
            row += width[row]
        head[rank] = row
    stuck = {rank: row for rank, row in enumerate(head) if row < ends[rank]}
    if stuck:
        waits = {rank: need for need, ranks in waiting.items() for rank in ranks}
        raise _deadlock(table, stuck, waits)
    return order


def meeting_order(table: Table, peer: Ints) -> list[int]:
    """The leading rows of a table with transfers, played with the hardest rule there is: a rank
    does one thing at a time, and both ends of a transfer have to stand at it.

    peer: per row, the other end of a transfer, -1 for compute. Of a transfer the order has the
    SEND only. Raises DeadlockError.
    """
    others, rank_of, is_send = peer.tolist(), table.rank.tolist(), table.is_send.tolist()
    width = (table.joined + 1).tolist()
    head, ends = table.starts[:-1].tolist(), table.starts[1:].tolist()
    order: list[int] = []
    ready = list(range(len(head)))
    while ready:
        rank = ready.pop()
        row, end = head[rank], ends[rank]
        while row < end:
            other = others[row]
            if other >= 0:
                there = rank_of[other]
                if head[there] != other:
                    break
                head[there] += 1
                ready.append(there)
            order.append(row if other < 0 or is_send[row] else other)
            row += width[row]
        head[rank] = row
    stuck = {rank: row for rank, row in enumerate(head) if row < ends[rank]}
    if stuck:
        raise _deadlock(table, stuck, {rank: others[row] for rank, row in stuck.items()})
    return order


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
