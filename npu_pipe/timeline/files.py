"""Timelines as files: JSON with a format version.

    {"format": "npu_pipe.timeline", "version": 1, "schedule": {"format": "npu_pipe.schedule", ...},
     "compute": [[0, "0F0", 12.5, 890.0], ...], "transfers": [[0, "0SEND_F0", ...], ...],
     "waits": [[1, "1RECV_F0", ...], ...], "phases": [[0, "optimizer", ...], ...]}

Rows are rank, name, start and end. A file is proved as it is read: whatever else reads it may
lean on that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from npu_pipe.errors import DataError, ScheduleError
from npu_pipe.files import write_whole
from npu_pipe.ir.action import Kind, Step, flatten, parse_step
from npu_pipe.ir.files import schedule_from_json, to_json
from npu_pipe.ir.schedule import Schedule
from npu_pipe.timeline.phase import Phase, PhaseSpan
from npu_pipe.timeline.timeline import Span, Timeline

__all__ = [
    "load_timeline",
    "read_json",
    "require_fields",
    "save_timeline",
    "timeline_from_json",
    "timeline_to_json",
]

VERSION = 1
_FORMAT = "npu_pipe.timeline"
_LONGEST_US = 1e15  # thirty years
_SECTIONS = ("compute", "transfers", "waits", "phases")


def timeline_to_json(timeline: Timeline) -> dict[str, Any]:
    """The timeline as a JSON value."""
    return {
        "format": _FORMAT,
        "version": VERSION,
        "schedule": json.loads(to_json(timeline.schedule)),
        **{
            section: [[rank, str(name), start, end] for rank, name, start, end in spans]
            for section in _SECTIONS
            for spans in [getattr(timeline, section)]
        },
    }


def timeline_from_json(data: Any) -> Timeline:
    """Read and prove a timeline; raises DataError for whatever is wrong with it."""
    fields = ("format", "version", "schedule", *_SECTIONS)
    require_fields(data, _FORMAT, VERSION, fields)
    try:
        schedule = schedule_from_json(json.dumps(data["schedule"]))
    except ScheduleError as error:
        raise _bad(f"its schedule is wrong: {error}") from error
    compute, transfers, waits = (
        _spans(data, section, schedule, is_right)
        for section, is_right in (
            ("compute", lambda kind: kind.is_compute),
            ("transfers", lambda kind: not kind.is_compute),
            ("waits", lambda kind: kind.is_receive),
        )
    )
    _require_order(compute)
    phases = tuple(
        PhaseSpan(rank, _phase(name), start, end)
        for rank, name, start, end in _rows(data, "phases", schedule)
    )
    return Timeline(schedule, compute, transfers, waits, phases)


def save_timeline(timeline: Timeline, path: str | Path) -> None:
    """Write a file that `load_timeline` reads. Raises ConfigError when it cannot be written."""
    write_whole(json.dumps(timeline_to_json(timeline), separators=(",", ":")) + "\n", path)


def load_timeline(path: str | Path) -> Timeline:
    """Read and prove a file; raises DataError."""
    return timeline_from_json(read_json(path))


def read_json(path: str | Path) -> Any:
    """The JSON value in a file; raises DataError when there is none."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, not JSON, no path
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            "a measured window is read from a JSON file",
            f"{path}: {reason}",
            "check the path, or run it again",
        ) from error


def require_fields(data: Any, format_: str, version: int, fields: tuple[str, ...]) -> None:
    """Raise DataError unless `data` is an object of this format and version with these fields."""
    if not isinstance(data, dict) or data.get("format") != format_:
        raise _bad(f'it has no "format": "{format_}"')
    if type(data.get("version")) is not int or data["version"] != version:
        raise DataError(
            f"this npu_pipe reads version {version} of {format_}",
            f"the file has version {brief(data.get('version'))}",
            "read it with the npu_pipe that wrote it, or run it again",
        )
    for field in sorted(data.keys() ^ set(fields)):
        raise _bad(f"the field {field!r:.80} is {'missing' if field in fields else 'unknown'}")


def _spans(
    data: Mapping[str, Any], section: str, schedule: Schedule, is_right: Callable[[Kind], bool]
) -> tuple[Span, ...]:
    spans = []
    seen = set()
    for rank, name, start, end in _rows(data, section, schedule):
        try:
            step: Step = parse_step(name)
        except ScheduleError as error:
            raise _bad(f"{section}: {error.facts}") from error
        for action in flatten(step):
            inside = action.stage < schedule.stages and action.microbatch < schedule.microbatches
            if not inside or not is_right(action.kind) or schedule.rank_of(action) != rank:
                raise _bad(f"{section} has {name} on rank {rank}, where the schedule has it not")
            if action in seen:
                raise _bad(f"{section} has {action} twice")
            seen.add(action)
        spans.append(Span(rank, step, start, end))
    return tuple(spans)


def _rows(
    data: Mapping[str, Any], section: str, schedule: Schedule
) -> list[tuple[int, str, float, float]]:
    rows = data[section]
    if not isinstance(rows, list):
        raise _bad(f"{section} is {brief(rows)}, and no list")
    for row in rows:
        if not isinstance(row, list) or len(row) != 4 or not _is_span(row, schedule.ranks):
            raise _bad(f"{section} has {brief(row)}, and no [rank, name, start, end] in order")
    return [(rank, name, float(start), float(end)) for rank, name, start, end in rows]


def _is_span(row: list[Any], ranks: int) -> bool:
    rank, name, start, end = row
    if type(rank) is not int or not 0 <= rank < ranks or type(name) is not str:
        return False
    if type(start) not in (int, float) or type(end) not in (int, float):
        return False
    return bool(-_LONGEST_US < start <= end < _LONGEST_US)  # False for NaN


def _require_order(compute: tuple[Span, ...]) -> None:
    """Rank after rank, each one after another."""
    at = (-1, -math.inf)
    for span in compute:
        if span.rank < at[0] or (span.rank == at[0] and span.start_us < at[1]):
            raise _bad(f"{span.action} begins before what stands before it has ended")
        at = (span.rank, span.end_us)


def _phase(name: str) -> Phase:
    try:
        return Phase(name)
    except ValueError as error:
        raise _bad(f"phases has {name!r:.80}") from error


def _bad(facts: str) -> DataError:
    return DataError(
        "a measured window is JSON as npu_pipe writes it",
        facts,
        "it was damaged or edited: run it again",
    )
