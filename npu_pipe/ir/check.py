"""Prove a schedule: every action once, on the right rank, and in an order that can run."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from npu_pipe.errors import DeadlockError, ScheduleError
from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.needs import KINDS, Table
from npu_pipe.ir.schedule import Schedule

__all__ = ["at_row", "check_schedule", "deadlock", "homes", "run_order"]

Ints = npt.NDArray[np.int64]


def check_schedule(schedule: Schedule) -> None:
    """Raise ScheduleError (with rank, position and action) unless the schedule can run.

    Holds afterwards: each F, and each B or I+W, exactly once per stage and microbatch, on the
    rank that holds the stage (laws 1 and 2); and some order of all ranks together satisfies
    every need, so that no rank waits forever.
    """
    _check_sizes(schedule)
    table = Table.of(schedule.orders)
    _check_numbers(schedule, table)
    _check_homes(schedule, table)
    _check_complete(schedule, table)
    where = table.where(schedule.stages, schedule.microbatches)
    _check_local_order(table, table.needs(where))
    run_order(table, where)


def run_order(table: Table, where: Ints) -> list[int]:
    """The rows of a table of compute in an order in which every need comes first.

    Raises DeadlockError with the cycle when there is none. Plays the orders rank by rank: a
    rank goes on until it needs something not yet done, and is woken when that is.
    """
    needed = table.needs(where)
    # What a rank needs of itself is settled by _check_local_order: only the need of another
    # stage matters here, and each action has one at most. A pair waits for both of its own.
    other = np.where(table.stage[needed] != table.stage[:, None], needed, -1).max(axis=1)
    partner = np.full(len(table), -1, dtype=np.int64)
    partner[:-1][table.joined[:-1]] = other[1:][table.joined[:-1]]
    first, second, joined = other.tolist(), partner.tolist(), table.joined.tolist()
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
                if need < 0 or done[need]:
                    rows = (row, row + 1) if joined[row] else (row,)
                    for row in rows:
                        done[row] = 1
                        order.append(row)
                        if row in waiting:
                            ready += waiting.pop(row)
                    row += 1
                    continue
            waiting.setdefault(need, []).append(rank)
            break
        head[rank] = row
    if len(order) < len(table):
        stuck = {rank: row for rank, row in enumerate(head) if row < ends[rank]}
        waits = {rank: need for need, ranks in waiting.items() for rank in ranks}
        raise deadlock(table, stuck, waits)
    return order


def deadlock(table: Table, stuck: dict[int, int], waits: dict[int, int]) -> DeadlockError:
    """The error for ranks that stand at row stuck[rank] and wait for row waits[rank]."""
    rank, seen = next(iter(stuck)), []
    while rank not in seen:
        seen.append(rank)
        rank = int(table.rank[waits[rank]])
    ring = seen[seen.index(rank) :]
    story = ", ".join(
        f"rank {rank} at position {table.position[stuck[rank]]} waits in "
        f"{table.action(stuck[rank])} for {table.action(waits[rank])} of rank "
        f"{table.rank[waits[rank]]} at position {table.position[waits[rank]]}"
        for rank in ring
    )
    cycle = tuple((rank, str(table.action(stuck[rank]))) for rank in ring)
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


def _check_sizes(schedule: Schedule) -> None:
    ranks, stages = schedule.ranks, schedule.stages
    if ranks < 1 or stages < 1 or schedule.microbatches < 1:
        raise ScheduleError(
            "a schedule has at least one rank, one stage and one microbatch",
            f"{ranks} ranks, {stages} stages and {schedule.microbatches} microbatches were given",
            "give at least one of each",
        )
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < ranks:
            raise ScheduleError(
                f"a stage lies on one of the ranks 0..{ranks - 1}",
                f"stage {stage} is placed on rank {rank}",
                "place it on one of them, or give that rank an order",
            )
    for rank in range(ranks):
        if not schedule.stages_of(rank):
            raise ScheduleError(
                "each rank holds at least one stage",
                f"rank {rank} holds none",
                "place a stage on it, or use fewer ranks",
                rank=rank,
            )
    for microbatch in schedule.mirrored:
        if not 0 <= microbatch < schedule.microbatches:
            raise ScheduleError(
                f"microbatches are numbered 0..{schedule.microbatches - 1}",
                f"{microbatch} is listed as mirrored",
                "list only existing microbatches",
            )


def _check_numbers(schedule: Schedule, table: Table) -> None:
    allowed = (Kind.F, Kind.B, Kind.I, Kind.W) if schedule.training else (Kind.F,)
    stages, microbatches = schedule.stages, schedule.microbatches
    wrong = (
        ~np.isin(table.kind, [KINDS.index(kind) for kind in allowed])
        | ~np.isin(table.stage, np.arange(stages))
        | ~np.isin(table.microbatch, np.arange(microbatches))
    )
    for row in np.flatnonzero(wrong)[:1]:
        is_transfer = not KINDS[table.kind[row]].is_compute
        raise at_row(
            table,
            row,
            f"the actions of this schedule are {' '.join(allowed)} of stages 0..{stages - 1} "
            f"and microbatches 0..{microbatches - 1}",
            "it is none of them",
            "take it out, lower() places transfers"
            if is_transfer
            else "renumber it, or take it out",
        )


def homes(schedule: Schedule, stage: Ints, microbatch: Ints) -> Ints:
    """Per pair of stage and microbatch, the rank that holds it."""
    home = np.array(schedule.placement)[stage]
    mirrored = np.isin(microbatch, schedule.mirrored)
    return np.where(mirrored, schedule.ranks - 1 - home, home)


def _check_homes(schedule: Schedule, table: Table) -> None:
    home = homes(schedule, table.stage, table.microbatch)
    for row in np.flatnonzero(home != table.rank)[:1]:
        raise at_row(
            table,
            row,
            "an action runs on the rank that holds its stage",
            f"its stage lies on rank {home[row]}",
            f"move it to rank {home[row]}, or change the placement",
        )


def _check_complete(schedule: Schedule, table: Table) -> None:
    counts = np.zeros((len(KINDS), schedule.stages, schedule.microbatches), dtype=np.int64)
    np.add.at(counts, (table.kind, table.stage, table.microbatch), 1)
    forward, whole, half_i, half_w = counts[:4]
    for row in np.flatnonzero(counts[table.kind, table.stage, table.microbatch] > 1)[1:2]:
        raise at_row(
            table, row, "each action runs once", "it is there more than once", "remove one of them"
        )
    both = (whole > 0) & ((half_i > 0) | (half_w > 0))
    for row in np.flatnonzero((table.kind == 1) & both[table.stage, table.microbatch])[:1]:
        raise at_row(
            table,
            row,
            "a backward is either one B, or an I and a W",
            "its stage and microbatch have both forms",
            "keep the B, or keep the I and the W",
        )
    wanted = {Kind.F: forward}
    if schedule.training:
        wanted |= {Kind.I: whole + half_i, Kind.W: whole + half_w}
    for kind, count in wanted.items():
        for stage, microbatch in np.argwhere(count == 0)[:1].tolist():
            missing = Action(kind, stage, microbatch)
            rank = schedule.rank_of(missing)
            other = "" if kind is Kind.F else f" (nor {Action(Kind.B, stage, microbatch)})"
            raise ScheduleError(
                "each F, and each B or I and W, runs once for every stage and microbatch",
                f"{missing}{other} is missing on rank {rank}",
                f"add it to the order of rank {rank}",
                rank=rank,
                action=str(missing),
            )


def _check_local_order(table: Table, needed: Ints) -> None:
    """On one rank: an action stands after what it needs there."""
    rows = np.arange(len(table))
    for which in (0, 1):
        need = needed[:, which]
        late = (need >= 0) & (table.rank[need] == table.rank) & (need >= rows)
        for row in np.flatnonzero(late)[:1]:
            raise at_row(
                table,
                row,
                "an action stands after what it needs",
                f"it needs {table.action(need[row])}, which comes at position "
                f"{table.position[need[row]]}",
                "swap them",
            )
    same = table.joined[:-1] & (table.microbatch[:-1] == table.microbatch[1:])
    for row in np.flatnonzero(same)[:1]:
        raise at_row(
            table,
            row,
            "the halves of a fused pair are of different microbatches",
            f"its other half {table.action(row + 1)} needs it",
            "run them one after the other",
        )


def at_row(table: Table, row: int, rule: str, facts: str, cure: str) -> ScheduleError:
    action = table.action(row)
    rank, position = int(table.rank[row]), int(table.position[row])
    return ScheduleError(
        rule,
        f"rank {rank} has {action} at position {position}: {facts}",
        cure,
        rank=rank,
        position=position,
        action=str(action),
    )
