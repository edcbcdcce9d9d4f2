"""A timeline as text: a row a rank, a column a slot of time.

    time    0  1  2  3  4  5  6  7  8  9
    rank 0  F0 F1 .. B0--- F2 B1--- .. B2---      B0--- lasts two slots; .. is idle

Where ranks hold several stages, cells carry the whole action: 4F0. What is too long for the
width becomes a strip, in which each character shows what fills most of its time; there f0
would be a later stage of its rank, and & a fused pair:

    one character is 0.5
    time    0         5
    rank 0  F0F1..B0--F2B1--..B2--
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby

from npu_pipe.errors import ConfigError
from npu_pipe.ir.action import Action, Step
from npu_pipe.timeline.palette import Chunks
from npu_pipe.timeline.timeline import Span, Timeline
from npu_pipe.timeline.times import TimeScale, nice_step, time_scale

__all__ = ["Cell", "Grid", "common_step", "lay_grid", "text_grid"]

_MOST_SLOTS = 400  # what is longer is a strip even where nobody gave a width
_STRIP = 100


@dataclass(frozen=True, slots=True)
class Cell:
    """A stretch of one rank's row: one step, or idle time (None)."""

    text: str
    step: Step | None


@dataclass(frozen=True, slots=True)
class Grid:
    """head: the lines above the rows; rows: per rank, its cells behind `names[rank]`."""

    head: tuple[str, ...]
    names: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class _Columns:
    """count columns, each `step` of time and `width` characters; a table has gaps between."""

    count: int
    step: float
    width: int

    @property
    def is_table(self) -> bool:
        return self.width > 1


def text_grid(timeline: Timeline, *, unit: float | None = None, width: int | None = None) -> str:
    """The grid as plain text.

    unit: the time of one slot; None for the greatest step that all times are multiples of.
    width: in characters; where the table is wider it becomes a strip. None for no bound within
        reason. Raises ConfigError for a unit that is not a positive time.
    """
    grid = lay_grid(timeline, unit=unit, width=width)
    rows = (
        "".join((name, *(cell.text for cell in row)))
        for name, row in zip(grid.names, grid.rows, strict=True)
    )
    return "\n".join(line.rstrip() for line in (*grid.head, *rows))


def lay_grid(timeline: Timeline, *, unit: float | None = None, width: int | None = None) -> Grid:
    """The grid as cells, for who wants to colour them; see `text_grid`."""
    if unit is not None and not (math.isfinite(unit) and unit > 0):
        raise ConfigError("the unit of a grid is a positive time", f"it is {unit}", "give another")
    ranks = timeline.schedule.ranks
    margin = len(f"rank {ranks - 1}") + 2
    chunks = Chunks(timeline.schedule)
    columns = _columns(timeline, chunks, unit, None if width is None else max(width - margin, 10))
    tracks: list[list[Span]] = [[] for _ in range(ranks)]
    for span in timeline.compute:
        tracks[span.rank].append(span)
    return Grid(
        head=_head(timeline, columns, chunks, margin),
        names=tuple(f"rank {rank}".ljust(margin) for rank in range(ranks)),
        rows=tuple(tuple(_cells(track, columns, chunks)) for track in tracks),
    )


def common_step(times: Iterable[float]) -> float | None:
    """The greatest step of which all times are multiples; None where there is no sensible one."""
    parts: list[Fraction] = []
    for time in set(times):
        part = Fraction(time).limit_denominator(1000)
        if not math.isclose(part, time, rel_tol=1e-9, abs_tol=1e-9):
            return None
        parts.append(part)
    step = math.gcd(*(part.numerator for part in parts))
    return step / math.lcm(*(part.denominator for part in parts)) if step else None


def _columns(timeline: Timeline, chunks: Chunks, unit: float | None, room: int | None) -> _Columns:
    """A table if all labels and columns have room, else a strip of single characters."""
    makespan = timeline.makespan or 1.0
    step = unit or common_step(time for span in timeline.compute for time in span[2:])
    slots = math.ceil(round(makespan / step, 6)) if step else math.inf
    if step and slots <= _MOST_SLOTS:
        count = int(slots)
        width = 3
        for span in timeline.compute:
            held = max(round((span.end_us - span.start_us) / step), 1)
            width = max(width, math.ceil((len(chunks.label(span.action)) + 1) / held))
        if room is None or count * width - 1 <= room:
            return _Columns(count, step, width)
    room = room or _STRIP
    if step and slots <= room:
        each = room // int(slots)
        return _Columns(int(slots) * each, step / each, 1)
    step = nice_step(makespan, room, of=(1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8))
    return _Columns(math.ceil(round(makespan / step, 6)), step, 1)


def _head(timeline: Timeline, columns: _Columns, chunks: Chunks, margin: int) -> tuple[str, ...]:
    """What a column means, where that is not plain, and the ruler."""
    scale = time_scale(timeline)
    one = scale.text(columns.step)
    ruler = f"{'time':<{margin}}{_ruler(columns, scale)}"
    if columns.is_table:
        return (ruler,) if one == "1" else (f"one column is {one}", ruler)
    later = "; small letters are later stages of a rank" if chunks.most > 1 else ""
    return (f"one character is {one}{later}", ruler)


def _ruler(columns: _Columns, scale: TimeScale) -> str:
    """Times over the first of every 1, 2, 5, 10, ... columns: the closest that leave gaps."""
    for every in (factor * 10**power for power in range(9) for factor in (1, 2, 5)):
        marks = [scale.number(i * columns.step) for i in range(0, columns.count, every)]
        room = every * columns.width
        if max(map(len, marks)) < room and (columns.is_table or every >= 10):
            if (len(marks) - 1) * room + len(marks[-1]) > columns.count * columns.width:
                marks.pop()
            return "".join(mark.ljust(room) for mark in marks)
    return ""


def _cells(track: list[Span], columns: _Columns, chunks: Chunks) -> Iterator[Cell]:
    for owner, run in groupby(_owners(track, columns)):
        length = len(list(run))
        if owner is None:
            idle = "..".ljust(columns.width) if columns.is_table else "."
            yield Cell(idle * length, None)
            continue
        step, rank = track[owner].action, track[owner].rank
        if columns.is_table:
            text = chunks.label(step).ljust(length * columns.width - 1, "-") + " "
        else:
            text = _short(step, rank, chunks, length).ljust(length, "-")
        yield Cell(text, step)


def _owners(track: list[Span], columns: _Columns) -> list[int | None]:
    """Per column, the index of the span that it shows, or None for idle.

    It shows the kind that has most time there. What a kind did not get is carried to the next
    columns where it runs, so that in a coarse strip each kind keeps its share.
    """
    step = columns.step
    shares: list[list[tuple[int | None, float]]] = [[] for _ in range(columns.count)]
    for index, (_, _, start, end) in enumerate(track):
        last = min(math.ceil(end / step), columns.count)
        for column in range(math.floor(start / step), last):
            share = min(end, (column + 1) * step) - max(start, column * step)
            shares[column].append((index, share))
    owed: dict[object, float] = {}
    owners: list[int | None] = []
    for held in shares:
        held.append((None, step - sum(share for _, share in held)))
        held.sort(key=lambda part: -part[1])
        here: dict[object, int | None] = {}
        for owner, share in held:
            sort = None if owner is None else _sort(track[owner].action)
            if share > 1e-9 * step:
                here.setdefault(sort, owner)
            owed[sort] = owed.get(sort, 0.0) + share
        shown = max(here, key=lambda sort: owed[sort])
        owed[shown] -= step
        owners.append(here[shown])
    return owners


def _sort(step: Step) -> object:
    return (step.kind, step.stage) if isinstance(step, Action) else "&"


def _short(step: Step, rank: int, chunks: Chunks, room: int) -> str:
    """Its name in a strip: F0, or f0 if not of the first stage of the rank; else the letter."""
    if not isinstance(step, Action):
        return "&"
    letter = step.kind.lower() if chunks.lightness(rank, step) else str(step.kind)
    name = f"{letter}{step.microbatch}"
    return name if len(name) <= room else letter
