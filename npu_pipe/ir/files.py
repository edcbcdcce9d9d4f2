"""Schedules and programs as files: JSON with a format version and a hash of the content, or CSV.

    {"format": "npu_pipe.schedule", "version": 1, "sha256": "...", "name": "1f1b",
     "microbatches": 2, "placement": [0, 1], "mirrored": [], "training": true,
     "orders": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]}

A program has the format "npu_pipe.program", orders with transfers, and its prefetch besides.
The hash covers all but itself and the name: two files with one hash run the same. For CSV see
`csv_files`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from npu_pipe.errors import ScheduleError
from npu_pipe.files import write_whole
from npu_pipe.ir.action import Step
from npu_pipe.ir.check import check_schedule
from npu_pipe.ir.csv_files import (
    program_from_csv,
    program_to_csv,
    schedule_from_csv,
    schedule_to_csv,
)
from npu_pipe.ir.deadlock import check_program
from npu_pipe.ir.program import Program, compute_of
from npu_pipe.ir.schedule import Schedule
from npu_pipe.ir.text import parse_order

__all__ = [
    "is_file_name",
    "load_program",
    "load_schedule",
    "program_from_json",
    "program_to_json",
    "save_program",
    "save_schedule",
    "schedule_from_json",
    "schedule_hash",
    "to_json",
]

VERSION = 1
_FIELDS: Mapping[str, type] = {
    "format": str,
    "version": int,
    "sha256": str,
    "name": str,
    "microbatches": int,
    "placement": list,
    "mirrored": list,
    "training": bool,
    "orders": list,
}
_FORMATS = {
    "npu_pipe.schedule": _FIELDS,
    "npu_pipe.program": {**_FIELDS, "prefetch": int},
}


def schedule_hash(schedule: Schedule) -> str:
    """SHA-256 (hex) of what the schedule does; its name does not count."""
    return _hash(_content(schedule))


def to_json(schedule: Schedule) -> str:
    """The text of a schedule's file."""
    return _text("npu_pipe.schedule", schedule.name, _content(schedule))


def program_to_json(program: Program) -> str:
    """The text of a program's file."""
    return _text("npu_pipe.program", program.schedule.name, _program_content(program))


def schedule_from_json(text: str) -> Schedule:
    """Read and prove a schedule; raises ScheduleError for whatever is wrong with it."""
    data = _read(text, "npu_pipe.schedule")
    schedule = _schedule(data, _orders(data))
    _check_hash(data, _content(schedule))
    check_schedule(schedule)
    return schedule


def program_from_json(text: str) -> Program:
    """Read and prove a program; raises ScheduleError for whatever is wrong with it."""
    data = _read(text, "npu_pipe.program")
    orders = _orders(data)
    schedule = _schedule(data, tuple(map(compute_of, orders)))
    program = Program(schedule, orders, data["prefetch"])
    _check_hash(data, _program_content(program))
    check_program(program)
    return program


def save_schedule(schedule: Schedule, path: str | Path) -> None:
    """Prove the schedule, then write it: as JSON, or for torch as CSV where the path ends in .csv.

    An existing file is replaced as a whole. Raises ScheduleError for a schedule that is wrong or
    has no CSV form, ConfigError for a path that cannot be written.
    """
    check_schedule(schedule)
    write = {".json": to_json, ".csv": schedule_to_csv}[_ending(path)]
    write_whole(write(schedule), path)


def is_file_name(word: str) -> bool:
    """Whether a word that may be the name of a schedule is that of a file."""
    return word.endswith((".json", ".csv"))


def load_schedule(path: str | Path) -> Schedule:
    """Read and prove a schedule file; raises ScheduleError. One read from CSV is named after
    its file."""
    if _ending(path) == ".csv":
        return schedule_from_csv(_contents(path), name=Path(path).stem)
    return schedule_from_json(_contents(path))


def save_program(program: Program, path: str | Path) -> None:
    """As `save_schedule`, for a program."""
    check_program(program)
    write = {".json": program_to_json, ".csv": program_to_csv}[_ending(path)]
    write_whole(write(program), path)


def load_program(path: str | Path) -> Program:
    """Read and prove a program file; raises ScheduleError, and DeadlockError where it would hang.

    One read from CSV has the least prefetch that its order of receives allows.
    """
    if _ending(path) == ".csv":
        return program_from_csv(_contents(path), name=Path(path).stem)
    return program_from_json(_contents(path))


def _read(text: str, kind: str) -> dict[str, Any]:
    """The fields of a file of this format, each of its type."""
    fields = _FORMATS[kind]
    try:
        data = json.loads(text, object_pairs_hook=_no_twins)
    except (ValueError, RecursionError) as error:
        raise _bad("it is not JSON", str(error)) from error
    if not isinstance(data, dict) or data.get("format") != kind:
        raise _bad(f'it has no "format": "{kind}"', "give a file of that kind")
    if data.get("version") != VERSION:
        raise ScheduleError(
            f"this npu_pipe reads version {VERSION} of the schedule format",
            f"the file has version {brief(data.get('version'))}",
            "read it with the npu_pipe that wrote it, or write it again",
        )
    for field in sorted(data.keys() ^ fields.keys()):
        state = "is missing" if field in fields else "is unknown"
        raise _bad(f"the field {field!r} {state}", f"fields are {', '.join(fields)}")
    for field, type_ in fields.items():
        if type(data[field]) is not type_:
            raise _bad(
                f"{field!r} is {brief(data[field])}",
                f"the JSON of a Python {type_.__name__} belongs there",
            )
    return data


def _schedule(data: dict[str, Any], orders: tuple[tuple[Step, ...], ...]) -> Schedule:
    return Schedule(
        name=data["name"],
        microbatches=data["microbatches"],
        placement=_whole(data, "placement"),
        orders=orders,
        mirrored=_whole(data, "mirrored"),
        training=data["training"],
    )


def _content(schedule: Schedule) -> dict[str, Any]:
    return {
        "microbatches": schedule.microbatches,
        "placement": list(schedule.placement),
        "mirrored": list(schedule.mirrored),
        "training": schedule.training,
        "orders": [list(map(str, order)) for order in schedule.orders],
    }


def _program_content(program: Program) -> dict[str, Any]:
    return {
        **_content(program.schedule),
        "prefetch": program.prefetch,
        "orders": [list(map(str, order)) for order in program.orders],
    }


def _text(kind: str, name: str, content: dict[str, Any]) -> str:
    head = {"format": kind, "version": VERSION, "sha256": _hash(content), "name": name}
    return json.dumps({**head, **content}, indent=1) + "\n"


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _check_hash(data: dict[str, Any], content: dict[str, Any]) -> None:
    if _hash(content) != data["sha256"]:
        raise ScheduleError(
            "a schedule file carries the hash of its content",
            f"the content hashes to {_hash(content)}, the file says {data['sha256']!r:.80}",
            "it was damaged or edited: take the original, or build the schedule and save it again",
        )


def _orders(data: dict[str, Any]) -> tuple[tuple[Step, ...], ...]:
    return tuple(_order(rank, order) for rank, order in enumerate(data["orders"]))


def _order(rank: int, order: object) -> tuple[Step, ...]:
    if not isinstance(order, list) or not all(isinstance(text, str) for text in order):
        raise _bad(f"the order of rank {rank} is {brief(order)}", "a list of actions belongs there")
    return parse_order(order, rank=rank)


def _whole(data: dict[str, Any], field: str) -> tuple[int, ...]:
    for value in data[field]:
        if type(value) is not int:
            raise _bad(f"{field!r} holds {brief(value)}", "whole numbers belong there")
    return tuple(data[field])


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a field is there twice")
    return fields


def _bad(facts: str, cure: str) -> ScheduleError:
    return ScheduleError("a schedule file is JSON as save_schedule writes it", facts, cure)


def _ending(path: str | Path) -> str:
    ending = Path(path).suffix
    if ending not in (".json", ".csv"):
        raise ScheduleError(
            "schedule files end in .json, or in .csv for torch.distributed.pipelining",
            f"the path is {str(path)!r}",
            "give a path that ends in .json or .csv",
        )
    return ending


def _contents(path: str | Path) -> str:
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path no file can have
        raise ScheduleError(
            "the schedule file has to be read",
            f"{path}: {getattr(error, 'strerror', None) or error}",
            "check the path and its rights",
        ) from error
