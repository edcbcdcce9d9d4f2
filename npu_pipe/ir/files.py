"""Schedules as JSON files, with a format version and a hash of the content.

    {"format": "npu_pipe.schedule", "version": 1, "sha256": "...", "name": "1f1b",
     "microbatches": 2, "placement": [0, 1], "mirrored": [], "training": true,
     "orders": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]}

The hash covers all but itself and the name: two files with one hash run the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from npu_pipe.errors import ScheduleError
from npu_pipe.ir.action import Step
from npu_pipe.ir.check import check_schedule
from npu_pipe.ir.schedule import Schedule
from npu_pipe.ir.text import parse_order

__all__ = ["load_schedule", "save_schedule", "schedule_from_json", "schedule_hash", "to_json"]

FORMAT, VERSION = "npu_pipe.schedule", 1
_FIELDS = {
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


def schedule_hash(schedule: Schedule) -> str:
    """SHA-256 (hex) of what the schedule does; its name does not count."""
    content = _content(schedule)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def to_json(schedule: Schedule) -> str:
    """The file's text."""
    head = {"format": FORMAT, "version": VERSION, "sha256": schedule_hash(schedule)}
    return json.dumps({**head, "name": schedule.name, **_content(schedule)}, indent=1) + "\n"


def schedule_from_json(text: str) -> Schedule:
    """Read and prove a schedule; raises ScheduleError for whatever is wrong with it."""
    try:
        data = json.loads(text, object_pairs_hook=_no_twins)
    except (ValueError, RecursionError) as error:
        raise _bad("it is not JSON", str(error)) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise _bad(f'it has no "format": "{FORMAT}"', "give a file of that kind")
    if data.get("version") != VERSION:
        raise ScheduleError(
            f"this npu_pipe reads version {VERSION} of the schedule format",
            f"the file has version {brief(data.get('version'))}",
            "read it with the npu_pipe that wrote it, or write it again",
        )
    for field in sorted(data.keys() ^ _FIELDS.keys()):
        state = "is missing" if field in _FIELDS else "is unknown"
        raise _bad(f"the field {field!r} {state}", f"fields are {', '.join(_FIELDS)}")
    for field, kind in _FIELDS.items():
        if type(data[field]) is not kind:
            raise _bad(
                f"{field!r} is {brief(data[field])}",
                f"the JSON of a Python {kind.__name__} belongs there",
            )
    schedule = Schedule(
        name=data["name"],
        microbatches=data["microbatches"],
        placement=_whole(data, "placement"),
        orders=tuple(_order(rank, order) for rank, order in enumerate(data["orders"])),
        mirrored=_whole(data, "mirrored"),
        training=data["training"],
    )
    if schedule_hash(schedule) != data["sha256"]:
        raise ScheduleError(
            "a schedule file carries the hash of its content",
            f"the content hashes to {schedule_hash(schedule)}, the file says "
            f"{data['sha256']!r:.80}",
            "it was damaged or edited: take the original, or build the schedule and save it again",
        )
    check_schedule(schedule)
    return schedule


def save_schedule(schedule: Schedule, path: str | Path) -> None:
    """Prove the schedule, then write it; an existing file is replaced as a whole."""
    check_schedule(schedule)
    target = _json_path(path)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        try:
            partial.write_text(to_json(schedule), encoding="utf-8")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        raise _unusable("written", target, error) from error


def load_schedule(path: str | Path) -> Schedule:
    """Read and prove a schedule file; raises ScheduleError with the path."""
    source = _json_path(path)
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path no file can have
        raise _unusable("read", source, error) from error
    return schedule_from_json(text)


def _content(schedule: Schedule) -> dict[str, Any]:
    return {
        "microbatches": schedule.microbatches,
        "placement": list(schedule.placement),
        "mirrored": list(schedule.mirrored),
        "training": schedule.training,
        "orders": [[str(step) for step in order] for order in schedule.orders],
    }


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


def _json_path(path: str | Path) -> Path:
    if Path(path).suffix != ".json":
        raise ScheduleError(
            "schedule files are JSON and end in .json",
            f"the path is {str(path)!r}",
            "give a path that ends in .json",
        )
    return Path(path)


def _unusable(done: str, path: Path, error: Exception) -> ScheduleError:
    return ScheduleError(
        f"the schedule file has to be {done}", f"{path}: {error}", "check the path and its rights"
    )
