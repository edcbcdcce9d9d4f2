"""Prove a program: it keeps its schedule, and cannot hang with zero-buffer sends.

A send may wait until its receive is posted (NCCL may, HCCL may). So the program is played with
the hardest rule there is: a rank does one thing at a time, and a SEND and its RECV end
together, when both ranks stand at them. What runs like this runs on any transport.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from npu_pipe.errors import ScheduleError
from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.check import at_row, check_schedule, deadlock, homes
from npu_pipe.ir.needs import KINDS, Table
from npu_pipe.ir.program import Program, peer_of
from npu_pipe.ir.schedule import Schedule

__all__ = ["check_program", "transfers_of"]

Ints = npt.NDArray[np.int64]

_F, _B, _I = (KINDS.index(kind) for kind in (Kind.F, Kind.B, Kind.I))
_SEND_F, _SEND_B = KINDS.index(Kind.SEND_F), KINDS.index(Kind.SEND_B)
_IS_COMPUTE = np.array([kind.is_compute for kind in KINDS])
_IS_RECEIVE = np.array([kind.is_receive for kind in KINDS])


def check_program(program: Program) -> None:
    """Raise ScheduleError or DeadlockError unless the program can run on any transport.

    Holds afterwards, beside what `check_schedule` proves: compute stands in the schedule's
    order (law 9); each boundary between two ranks is crossed once each way per microbatch;
    a send stands after its producer and a receive before its consumer; per lane and pair of
    ranks, sends and receives have one order (law 4); nothing hangs (law 3).
    """
    check_schedule(program.schedule)
    table = Table.of(program.orders)
    _check_compute(program)
    _check_transfers(program.schedule, table)
    where = table.where(program.schedule.stages, program.schedule.microbatches)
    needed = table.needs(where)
    _check_neighbours(table, needed)
    receives = np.flatnonzero(_IS_RECEIVE[table.kind])
    sends = needed[receives, 0]
    _check_lanes(table, sends, receives)
    _check_prefetch(program, table, needed)
    _play(table, sends, receives)


def transfers_of(schedule: Schedule, table: Table) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
    """The transfers that a table of compute calls for, one a producing row.

    Columns: producing row, kind code of the send, stage that sends, stage that receives,
    sending rank, receiving rank. Stages of one rank hand over without a transfer.
    """
    forward = table.kind == _F
    row = np.flatnonzero(forward | (table.kind == _B) | (table.kind == _I))
    kind = np.where(forward[row], _SEND_F, _SEND_B)
    stage = table.stage[row]
    target = stage + np.where(forward[row], 1, -1)
    inside = (target >= 0) & (target < schedule.stages)
    row, kind, stage, target = row[inside], kind[inside], stage[inside], target[inside]
    from_rank = homes(schedule, stage, table.microbatch[row])
    to_rank = homes(schedule, target, table.microbatch[row])
    far = from_rank != to_rank
    return row[far], kind[far], stage[far], target[far], from_rank[far], to_rank[far]


def _check_compute(program: Program) -> None:
    if len(program.orders) != program.schedule.ranks:
        raise ScheduleError(
            "a program has one order for each rank of its schedule",
            f"it has {len(program.orders)} for {program.schedule.ranks} ranks",
            "lower the schedule again",
        )
    for rank, (order, wanted) in enumerate(
        zip(program.orders, program.schedule.orders, strict=True)
    ):
        compute = tuple(
            step for step in order if not isinstance(step, Action) or step.kind.is_compute
        )
        if compute == wanted:
            continue
        at = next(
            (i for i, (a, b) in enumerate(zip(compute, wanted, strict=False)) if a != b),
            min(len(compute), len(wanted)),
        )
        found = compute[at] if at < len(compute) else None
        raise ScheduleError(
            "a program computes in its schedule's order",
            f"rank {rank} computes {found or 'nothing'} as number {at}, where the schedule has "
            f"{wanted[at] if at < len(wanted) else 'nothing'}",
            "lower the schedule again, or change the schedule itself",
            rank=rank,
            position=order.index(found) if found else len(order),
            action=str(found or wanted[at]),
        )


def _check_transfers(schedule: Schedule, table: Table) -> None:
    wanted = np.zeros((len(KINDS), schedule.stages, schedule.microbatches), dtype=np.int64)
    row, kind, stage, target, _, _ = transfers_of(schedule, table)
    wanted[kind, stage, table.microbatch[row]] = 1
    wanted[kind + 1, target, table.microbatch[row]] = 1  # RECV_F follows SEND_F in Kind
    rule = (
        "each boundary between two ranks is crossed once each way per microbatch, sent by the "
        "rank of one stage and received by the rank of the next"
    )
    transfers = np.flatnonzero(~_IS_COMPUTE[table.kind])
    stages, microbatches = table.stage[transfers], table.microbatch[transfers]
    inside = (
        (stages >= 0)
        & (stages < schedule.stages)
        & (microbatches >= 0)
        & (microbatches < schedule.microbatches)
    )
    for at in transfers[~inside][:1]:
        raise at_row(table, at, rule, "there is no such stage or microbatch", "remove it")
    cells = (table.kind[transfers], stages, microbatches)
    found = np.zeros_like(wanted)
    np.add.at(found, cells, 1)
    home = homes(schedule, stages, microbatches)
    wrong = (found[cells] > wanted[cells]) | (home != table.rank[transfers])
    for at in transfers[wrong][-1:]:
        raise at_row(table, at, rule, "it is not called for there, or is there twice", "remove it")
    for code, s, microbatch in np.argwhere(found < wanted)[:1].tolist():
        missing = Action(KINDS[code], s, microbatch)
        rank = schedule.rank_of(missing)
        raise ScheduleError(
            rule,
            f"{missing} is missing on rank {rank}",
            f"add it to the order of rank {rank}",
            rank=rank,
            action=str(missing),
        )


def _check_neighbours(table: Table, needed: Ints) -> None:
    """On one rank: a send after its producer, a receive before its consumer."""
    here = (needed >= 0) & (table.rank[needed] == table.rank[:, None])
    late = here & (needed >= np.arange(len(table))[:, None])
    for row, which in np.argwhere(late)[:1]:
        need = needed[row, which]
        raise at_row(
            table,
            row,
            "an action stands after what it needs",
            f"it needs {table.action(need)}, which comes at position {table.position[need]}",
            "swap them",
        )


def _check_lanes(table: Table, sends: Ints, receives: Ints) -> None:
    """From one rank to another, the n-th send and the n-th receive are of one transfer."""
    pair = table.rank[sends] * (len(table.starts) - 1) + table.rank[receives]
    by_receive = np.lexsort((receives, pair))
    by_send = np.lexsort((sends, pair))
    for index in np.flatnonzero(by_receive != by_send)[:1]:
        row = int(receives[by_receive[index]])
        send = table.action(sends[by_send[index]])
        raise at_row(
            table,
            row,
            "in a lane, transfers are received in the order in which they are sent",
            f"it stands where rank {table.rank[sends[by_send[index]]]} sends {send}, "
            f"to be received by {peer_of(send)}",
            "give both ranks the same order, as lower() does",
        )


def _check_prefetch(program: Program, table: Table, needed: Ints) -> None:
    """Each receive stands where its lane holds less than `prefetch` inputs not begun to use.

    The runtime posts no receive earlier than that, so one that stood earlier could come too
    late for what the play below proves.
    """
    is_receive = _IS_RECEIVE[table.kind]
    gets = (needed >= 0) & is_receive[needed] & _IS_COMPUTE[table.kind][:, None]
    for down in (False, True):
        of_lane = is_receive & ((table.rank[needed[:, 0]] < table.rank) == down)
        asked = np.cumsum(of_lane)
        used = np.cumsum((gets & of_lane[needed]).any(axis=1))
        # Within a rank: asked - used, both counted from its first row.
        before = np.concatenate(([0], asked - used))[table.starts[:-1]]
        held = asked - used - np.repeat(before, np.diff(table.starts))
        for row in np.flatnonzero(of_lane & (held > program.prefetch))[:1]:
            raise at_row(
                table,
                row,
                f"a rank asks for at most prefetch = {program.prefetch} inputs of a lane before it "
                "begins to use them",
                f"this is number {held[row]}",
                "receive it later, or raise prefetch",
            )


def _play(table: Table, sends: Ints, receives: Ints) -> None:
    peers = np.full(len(table), -1, dtype=np.int64)
    peers[sends], peers[receives] = receives, sends
    peer, rank_of = peers.tolist(), table.rank.tolist()
    head, ends = table.starts[:-1].tolist(), table.starts[1:].tolist()
    ready = list(range(len(head)))
    while ready:
        rank = ready.pop()
        row, end = head[rank], ends[rank]
        while row < end:
            other = peer[row]
            if other >= 0:
                if head[rank_of[other]] != other:
                    break
                head[rank_of[other]] += 1
                ready.append(rank_of[other])
            row += 1
        head[rank] = row
    stuck = {rank: row for rank, row in enumerate(head) if row < ends[rank]}
    if stuck:
        raise deadlock(table, stuck, {rank: peer[row] for rank, row in stuck.items()})
