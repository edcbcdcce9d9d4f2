"""Prove a program: it keeps its schedule, and cannot hang with zero-buffer sends.

A send may wait until its receive is posted (NCCL may, HCCL may). So the program is played with
the hardest rule there is: a rank does one thing at a time, and a SEND and its RECV end
together, when both ranks stand at them. What runs like this runs on any transport.
"""

from __future__ import annotations

from itertools import compress, count, islice, zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from npu_pipe.errors import ScheduleError
from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.check import at_row, check_local_order, check_pairs, check_schedule, homes
from npu_pipe.ir.needs import KINDS, Table
from npu_pipe.ir.order import clock_order, meeting_order
from npu_pipe.ir.program import Program, peer_of
from npu_pipe.ir.schedule import Schedule

__all__ = [
    "Draft",
    "ProgramProof",
    "check_prefetch",
    "check_program",
    "inputs_ahead",
    "prove_program",
    "transfers_of",
]

Ints = npt.NDArray[np.int64]

_F, _B, _I = (KINDS.index(kind) for kind in (Kind.F, Kind.B, Kind.I))
_SEND_F, _SEND_B = KINDS.index(Kind.SEND_F), KINDS.index(Kind.SEND_B)


class ProgramProof(NamedTuple):
    """What the proof of a program leaves for those who use it next; see `check.Proof`.

    peer: per row, the other end of a transfer, -1 for compute.
    order: the leading rows in an order in which all ranks together can run; of a transfer the
        SEND only.
    """

    table: Table
    needed: Ints
    peer: Ints
    order: Ints


class Draft(NamedTuple):
    """What the maker of a program knows about it, which spares the proof finding it out.

    table: of its orders. clock: see `clock_order`.
    """

    table: Table
    clock: Ints


def check_program(program: Program) -> None:
    """Raise ScheduleError or DeadlockError unless the program can run on any transport.

    Holds afterwards, beside what `check_schedule` proves: compute stands in the schedule's
    order (law 9); each boundary between two ranks is crossed once each way per microbatch;
    a send stands after its producer and a receive before its consumer; per lane and pair of
    ranks, sends and receives have one order (law 4); no rank asks for more inputs ahead than
    prefetch allows; nothing hangs (law 3).
    """
    prove_program(program)


def prove_program(program: Program, draft: Draft | None = None) -> ProgramProof:
    """`check_program`, for those who go on with what it found out; kept as a schedule's is."""
    if not isinstance(program, Program):
        raise ScheduleError(
            "only a Schedule or a Program can be checked and run",
            f"a {type(program).__name__} was given",
            "lower() makes one of a schedule",
        )
    if not isinstance(program._proof, ProgramProof):
        check_schedule(program.schedule)
        _check_fields(program)
        object.__setattr__(program, "_proof", _prove(program, draft))
    assert isinstance(program._proof, ProgramProof)
    return program._proof


def _prove(program: Program, draft: Draft | None) -> ProgramProof:
    table = draft.table if draft else Table.of(program.orders)
    check_pairs(table)
    _check_compute(program, table)
    _check_transfers(program.schedule, table)
    where = table.where(program.schedule.stages, program.schedule.microbatches)
    needed = table.needs(where)
    check_local_order(table, needed)
    receives = np.flatnonzero(table.is_receive)
    sends = needed[receives, 0]
    _check_lanes(table, sends, receives)
    _check_held(program, table, needed)
    peer = np.full(len(table), -1, dtype=np.int64)
    peer[sends], peer[receives] = receives, sends
    order = clock_order(table, peer, draft.clock) if draft else None
    if order is None:
        order = meeting_order(table, peer)
    return ProgramProof(table, needed, peer, order)


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


def _check_fields(program: Program) -> None:
    orders, prefetch, ranks = program.orders, program.prefetch, program.schedule.ranks
    if type(orders) is not tuple or any(type(order) is not tuple for order in orders):
        raise ScheduleError(
            "the orders of a program are a tuple of tuples of steps",
            f"they are {orders!r:.80}",
            "lower the schedule again",
        )
    if len(orders) != ranks:
        raise ScheduleError(
            "a program has one order for each rank of its schedule",
            f"it has {len(orders)} for {ranks} ranks",
            "lower the schedule again",
        )
    check_prefetch(prefetch)


def check_prefetch(prefetch: int) -> None:
    """Raise ScheduleError unless this can be a prefetch depth."""
    if type(prefetch) is not int or prefetch < 1:
        raise ScheduleError(
            "prefetch counts the inputs of a lane that a rank may hold ahead of their use",
            f"it is {prefetch!r}",
            "give a whole number of at least 1",
        )


def _check_compute(program: Program, table: Table) -> None:
    is_compute = iter(table.is_compute[table.step_rows()].tolist())
    for rank, (order, wanted) in enumerate(
        zip(program.orders, program.schedule.orders, strict=True)
    ):
        mask = list(islice(is_compute, len(order)))
        compute = tuple(compress(order, mask))
        if compute == wanted:
            continue
        pairs = enumerate(zip_longest(compute, wanted))
        at, (found, due) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        positions = [*compress(count(), mask), len(order)]
        raise ScheduleError(
            "a program computes in its schedule's order",
            f"rank {rank} computes {found or 'nothing'} as number {at}, where the schedule has "
            f"{due or 'nothing'}",
            "lower the schedule again, or change the schedule itself",
            rank=rank,
            position=positions[at],
            action=str(found or due),
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
    transfers = np.flatnonzero(~table.is_compute)
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


def inputs_ahead(table: Table, needed: Ints) -> Ints:
    """Per receive, how many inputs of its lane its rank has then asked for and not begun to use,
    itself among them; 0 for all other rows. Their largest is the least prefetch that will do.

    needed: as `Table.needs` gives it.
    """
    is_receive, is_compute = table.is_receive, table.is_compute
    gets = [(rows >= 0) & is_receive[rows] & is_compute for rows in needed.T]
    ahead = np.zeros(len(table), dtype=np.int64)
    for down in (False, True):
        of_lane = is_receive & ((table.rank[needed[:, 0]] < table.rank) == down)
        asked = np.cumsum(of_lane)
        uses = (get & of_lane[rows] for get, rows in zip(gets, needed.T, strict=True))
        used = np.cumsum(np.logical_or(*uses))
        # Within a rank: asked - used, both counted from its first row.
        before = np.concatenate(([0], asked - used))[table.starts[:-1]]
        held = asked - used - np.repeat(before, np.diff(table.starts))
        ahead[of_lane] = held[of_lane]
    return ahead


def _check_held(program: Program, table: Table, needed: Ints) -> None:
    """The runtime posts no receive while its lane holds `prefetch` inputs not begun to use, so
    one that stood earlier could come too late for what the play below proves."""
    ahead = inputs_ahead(table, needed)
    for row in np.flatnonzero(ahead > program.prefetch)[:1]:
        raise at_row(
            table,
            row,
            f"a rank asks for at most prefetch = {program.prefetch} inputs of a lane before it "
            "begins to use them",
            f"this is number {ahead[row]}",
            "receive it later, or raise prefetch",
        )
