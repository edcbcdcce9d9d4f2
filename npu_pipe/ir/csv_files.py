"""Schedules and programs in the CSV form of torch.distributed.pipelining.

One row a rank, one cell a step; a blank cell is an idle slot and is skipped:

    0F0,0F1,0B0,0B1             compute only: a schedule. torch loads it with
    1F0,1B0,1F1,1B1             _PipelineScheduleRuntime._load_csv(path, format="compute_only")

    0F0,0SEND_F0,0F1,...        with transfers: a program, for format="compute_comms"
    1RECV_F0,1F0,1B0,...

The form says neither where a stage lies nor how many microbatches there are. A stage lies where
it runs, so a schedule that runs one stage on two ranks (DualPipe) has no such form; and there
are as many microbatches as most stages run forwards.

torch writes notes for FSDP among the steps: 0UNSHARD, 0RESHARD, and 0REDUCE_GRAD after the last
backward of stage 0. They move no data between stages and are skipped. The third is where torch
divides gradients by the number of microbatches, so a program is written with it.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from dataclasses import replace

from npu_pipe.errors import ScheduleError
from npu_pipe.ir.action import Action, Kind, Step, flatten, parse_step
from npu_pipe.ir.check import check_schedule
from npu_pipe.ir.deadlock import check_program, inputs_ahead, prove_program
from npu_pipe.ir.program import Program, compute_of
from npu_pipe.ir.schedule import Schedule

__all__ = ["program_from_csv", "program_to_csv", "schedule_from_csv", "schedule_to_csv"]

Orders = tuple[tuple[Step, ...], ...]

_NOTE = re.compile("(0|[1-9][0-9]{0,17})(UNSHARD|RESHARD|REDUCE_GRAD)")


def schedule_to_csv(schedule: Schedule) -> str:
    """The file's text. Raises ScheduleError for a schedule that is wrong or has no such form."""
    check_schedule(schedule)
    _check_form(schedule)
    return _lines([list(map(str, order)) for order in schedule.orders])


def program_to_csv(program: Program) -> str:
    """The file's text, likewise. prefetch has no place in it."""
    check_program(program)
    _check_form(program.schedule)
    return _lines([_with_notes(order) for order in program.orders])


def schedule_from_csv(text: str, *, name: str) -> Schedule:
    """Read and prove a schedule; raises ScheduleError, by rank and position, for what is wrong."""
    orders = _read(text)
    for rank, order in enumerate(orders):
        for position, step in enumerate(order):
            if isinstance(step, Action) and not step.kind.is_compute:
                raise ScheduleError(
                    "the CSV file of a schedule has compute only",
                    f"rank {rank} has {step} at position {position}",
                    "load_program reads files with transfers",
                    rank=rank,
                    position=position,
                    action=str(step),
                )
    schedule = _schedule(orders, name)
    check_schedule(schedule)
    return schedule


def program_from_csv(text: str, *, name: str) -> Program:
    """Read and prove a program, with the least prefetch that its order of receives allows.

    Raises ScheduleError, and DeadlockError for transfers that would hang.
    """
    orders = _read(text)
    schedule = _schedule(tuple(map(compute_of, orders)), name)
    program = Program(schedule, orders, prefetch=max(map(len, orders), default=0) + 1)
    proof = prove_program(program)
    least = inputs_ahead(proof.table, proof.needed).max(initial=1)
    return replace(program, prefetch=int(least))


def _read(text: str) -> Orders:
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        read = [_order(row, rank) for rank, row in enumerate(rows)]
    except csv.Error as error:
        raise ScheduleError(
            "a schedule file that ends in .csv is a table with one row a rank",
            f"row {rows.line_num - 1}: {error}",
            "write it as torch.distributed.pipelining or save_schedule does",
        ) from error
    for rank, (order, notes) in enumerate(read):
        held = {action.stage for step in order for action in flatten(step)} if notes else set()
        for column, stage, note in notes:
            if stage not in held:
                raise _bad_cell(rank, column, note, "the rank runs no such stage", "remove it")
    return tuple(order for order, _ in read)


def _order(row: list[str], rank: int) -> tuple[tuple[Step, ...], list[tuple[int, int, str]]]:
    """The steps of a row, and its notes: column, stage and text."""
    steps: list[Step] = []
    notes = []
    for column, text in enumerate(row):
        if not text:
            continue
        try:
            steps.append(parse_step(text))
        except ScheduleError as error:
            note = _NOTE.fullmatch(text)
            if note is None:
                raise _bad_cell(rank, column, text, error.rule, error.cure) from None
            notes.append((column, int(note[1]), text))
    return tuple(steps), notes


def _bad_cell(rank: int, column: int, text: str, facts: str, cure: str) -> ScheduleError:
    return ScheduleError(
        "each cell of a schedule's CSV file is blank or a step of the rank of its row",
        f"row {rank} (rank {rank}) has {text!r:.80} in column {column}, counted from 0: {facts}",
        cure,
        rank=rank,
        position=column,
        action=text,
    )


def _schedule(orders: Orders, name: str) -> Schedule:
    """The schedule of these orders of compute."""
    homes: dict[int, int] = {}
    forwards: set[Action] = set()
    for rank, order in enumerate(orders):
        for position, step in enumerate(order):
            for action in flatten(step):
                if homes.setdefault(action.stage, rank) != rank:
                    raise ScheduleError(
                        "in a CSV file a stage runs on one rank",
                        f"rank {rank} has {action} at position {position}, but rank "
                        f"{homes[action.stage]} runs stage {action.stage} too",
                        "move it there; a schedule with two replicas of its stages is kept "
                        "in a .json file",
                        rank=rank,
                        position=position,
                        action=str(action),
                    )
                if action.kind is Kind.F:
                    forwards.add(action)
    for stage in range(len(homes)):
        if stage not in homes:
            raise ScheduleError(
                "stages count from 0, without gaps",
                f"stage {stage} runs on no rank, stage {max(homes)} on rank {homes[max(homes)]}",
                "add its row, or renumber the stages",
            )
    counts = Counter(Counter(action.stage for action in forwards).values())
    return Schedule(
        name=name,
        microbatches=max(counts, key=lambda count: (counts[count], count), default=1),
        placement=tuple(homes[stage] for stage in range(len(homes))),
        orders=orders,
    )


def _check_form(schedule: Schedule) -> None:
    lacks = {
        "runs its stages on two ranks each": bool(schedule.mirrored),
        "has forwards only": not schedule.training,
    }
    for fact in (fact for fact, true in lacks.items() if true):
        raise ScheduleError(
            "the CSV form of torch.distributed.pipelining has one rank a stage, and backwards",
            f"schedule {schedule.name!r:.80} {fact}",
            "give a path that ends in .json",
        )


def _with_notes(order: tuple[Step, ...]) -> list[str]:
    """The cells of an order, with a REDUCE_GRAD after each stage's last backward."""
    last: dict[int, int] = {}
    for position, step in enumerate(order):
        for action in flatten(step):
            if action.kind in (Kind.B, Kind.W):
                last[action.stage] = position
    cells = list(map(str, order))
    for stage, position in last.items():
        cells[position] += f",{stage}REDUCE_GRAD"
    return cells


def _lines(rows: list[list[str]]) -> str:
    return "".join(",".join(row) + "\n" for row in rows)
