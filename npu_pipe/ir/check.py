"""Prove a schedule: every action once, on the right rank, and in an order that can run."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from npu_pipe.errors import ScheduleError
from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.needs import KINDS, Table
from npu_pipe.ir.order import run_order
from npu_pipe.ir.schedule import Schedule

__all__ = [
    "Proof",
    "at_row",
    "check_local_order",
    "check_pairs",
    "check_schedule",
    "homes",
    "prove_schedule",
]

Ints = npt.NDArray[np.int64]

_F, _B, _I, _W = (KINDS.index(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W))


class Proof(NamedTuple):
    """What the proof of a schedule or program leaves for those who use it next.

    needed: per row of the table, the two rows it needs; see `Table.needs`.
    order: the leading rows, in an order in which all ranks together can run.
    """

    table: Table
    needed: Ints
    order: list[int]


def check_schedule(schedule: Schedule) -> None:
    """Raise ScheduleError (with rank, position and action) unless the schedule can run.

    Holds afterwards: each F, and each B or I+W, exactly once per stage and microbatch, on the
    rank that holds the stage (laws 1 and 2); and some order of all ranks together satisfies
    every need, so that no rank waits forever.
    """
    prove_schedule(schedule)


def prove_schedule(schedule: Schedule) -> Proof:
    """`check_schedule`, for those who go on with what it found out.

    A proved schedule keeps its proof: neither changes, so it is proved once.
    """
    _check_fields(schedule)
    if not isinstance(schedule._proof, Proof):
        object.__setattr__(schedule, "_proof", _prove(schedule))
    assert isinstance(schedule._proof, Proof)
    return schedule._proof


def _prove(schedule: Schedule) -> Proof:
    _check_sizes(schedule)
    table = Table.of(schedule.orders)
    _check_numbers(schedule, table)
    _check_homes(schedule, table)
    _check_complete(schedule, table)
    needed = table.needs(table.where(schedule.stages, schedule.microbatches))
    check_local_order(table, needed)
    check_pairs(table)
    return Proof(table, needed, run_order(table, needed))


def _check_fields(schedule: Schedule) -> None:
    """A frozen dataclass holds whatever it is given, so its types are looked at here."""
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            "only a Schedule or a Program can be checked and run",
            f"a {type(schedule).__name__} was given",
            "make one with build_schedule or load_schedule",
        )
    fits = {
        "name": isinstance(schedule.name, str),
        "microbatches": type(schedule.microbatches) is int,
        "placement": _is_tuple_of(int, schedule.placement),
        "orders": _is_tuple_of(tuple, schedule.orders),
        "mirrored": _is_tuple_of(int, schedule.mirrored),
        "training": type(schedule.training) is bool,
    }
    for field in (field for field, good in fits.items() if not good):
        raise ScheduleError(
            "a schedule has a str as name, an int of microbatches, tuples of int as placement and "
            "mirrored, a tuple of tuples of steps as orders, and a bool as training",
            f"{field} is {getattr(schedule, field)!r:.80}",
            f"give {field} in that form",
        )


def _is_tuple_of(kind: type, value: object) -> bool:
    return type(value) is tuple and set(map(type, value)) <= {kind}


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
    bounds = (-1, *schedule.mirrored, schedule.microbatches)
    if any(before >= after for before, after in pairwise(bounds)):
        raise ScheduleError(
            f"mirrored lists microbatches among 0..{schedule.microbatches - 1}, once each and "
            "in ascending order",
            f"it is {schedule.mirrored!r:.80}",
            "list them in this form",
        )


def _check_numbers(schedule: Schedule, table: Table) -> None:
    allowed = (Kind.F, Kind.B, Kind.I, Kind.W) if schedule.training else (Kind.F,)
    stages, microbatches = schedule.stages, schedule.microbatches
    wrong = (
        ~np.isin(table.kind, [KINDS.index(kind) for kind in allowed])
        | (table.stage < 0)
        | (table.stage >= stages)
        | (table.microbatch < 0)
        | (table.microbatch >= microbatches)
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
    stages, microbatches = schedule.stages, schedule.microbatches
    if len(table) < stages * microbatches:  # and a table of counts could be too large to make
        forwards = {table.action(row) for row in np.flatnonzero(table.kind == _F).tolist()}
        cells = (Action(Kind.F, s, i) for s in range(stages) for i in range(microbatches))
        raise _missing(schedule, next(action for action in cells if action not in forwards))
    counts = np.zeros((len(KINDS), stages, microbatches), dtype=np.int64)
    np.add.at(counts, (table.kind, table.stage, table.microbatch), 1)
    forward, whole, half_i, half_w = counts[[_F, _B, _I, _W]]
    for row in np.flatnonzero(counts[table.kind, table.stage, table.microbatch] > 1)[1:2]:
        raise at_row(
            table, row, "each action runs once", "it is there more than once", "remove one of them"
        )
    both = (whole > 0) & ((half_i > 0) | (half_w > 0))
    for row in np.flatnonzero((table.kind == _B) & both[table.stage, table.microbatch])[:1]:
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
            raise _missing(schedule, Action(kind, stage, microbatch))


def _missing(schedule: Schedule, action: Action) -> ScheduleError:
    rank = schedule.rank_of(action)
    whole = Action(Kind.B, action.stage, action.microbatch)
    other = "" if action.kind is Kind.F else f" (nor {whole})"
    return ScheduleError(
        "each F, and each B or I and W, runs once for every stage and microbatch",
        f"{action}{other} is missing on rank {rank}",
        f"add it to the order of rank {rank}",
        rank=rank,
        action=str(action),
    )


def check_local_order(table: Table, needed: Ints) -> None:
    """On one rank: an action stands after what it needs there."""
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


def check_pairs(table: Table) -> None:
    """A fused pair is one F and one B that do not need each other."""
    first = np.flatnonzero(table.joined)
    second = first + 1
    kinds = (table.kind[first] != _F) | (table.kind[second] != _B)
    same = table.microbatch[first] == table.microbatch[second]
    for row in first[kinds | same][:1]:
        raise at_row(
            table,
            row,
            "a fused pair is one F and one B, in this order, of different microbatches",
            f"it is paired with {table.action(row + 1)}",
            "run them one after the other",
        )


def at_row(table: Table, row: int, rule: str, facts: str, cure: str) -> ScheduleError:
    """The error for what is wrong with one row."""
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
