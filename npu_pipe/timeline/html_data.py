"""A timeline as columns of numbers, for the script of a page.

One entry a compute span, rank after rank, in each of

    sort         which of `sorts`: kind, stage and colours; of a fused pair, of its two parts
    microbatch   of the first part; `second` of the last
    gap, length  times from the end of the step before on its rank, and from its own start
    giver        how many entries before it the one is that gave what it needed last; 0: none
    sent, late   times from that one's end to the start of the transfer, and on to its arrival
    rise, fall   changes of what its rank holds, at its start and at its end

Differences, because those repeat and so hardly take room once compressed. Times are whole
multiples of `tick`.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from npu_pipe.ir.action import Action, Kind, flatten
from npu_pipe.timeline.last_needs import last_needs
from npu_pipe.timeline.levels import Levels
from npu_pipe.timeline.palette import Chunks, fill, ink
from npu_pipe.timeline.timeline import Timeline
from npu_pipe.timeline.times import TimeScale

__all__ = ["columns", "pack"]

_TICKS = 10**8  # of a makespan at most: finer than anybody reads


class _Row(NamedTuple):
    sort: int
    microbatch: int
    second: int
    gap: int
    length: int
    giver: int
    sent: int
    late: int
    rise: float
    fall: float


def pack(data: dict[str, Any]) -> str:
    """JSON, deflated, in base64."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def columns(timeline: Timeline, levels: Levels, scale: TimeScale) -> dict[str, Any]:
    """What the script has to know of a timeline; its times in units of the scale."""
    schedule, chunks = timeline.schedule, Chunks(timeline.schedule)
    tick = _tick(timeline.makespan / scale.size)
    sorts: dict[tuple[Any, ...], int] = {}
    rows = list(_rows(timeline, levels, scale.size * tick, sorts))
    counts = [0] * schedule.ranks
    for span in timeline.compute:
        counts[span.rank] += 1
    return {
        "tick": tick,
        "unit": levels.unit,
        "microbatches": schedule.microbatches,
        "stages": [chunks.stages(rank) for rank in range(schedule.ranks)],
        "counts": counts,
        "before": levels.before,
        "sorts": [
            [_part(kind, stage, rank, chunks) for kind, stage in parts] for rank, *parts in sorts
        ],
        "rows": {name: [row[i] for row in rows] for i, name in enumerate(_Row._fields)},
    }


def _rows(
    timeline: Timeline, levels: Levels, tick: float, sorts: dict[tuple[Any, ...], int]
) -> Iterator[_Row]:
    """Numbers the sorts as it meets them. tick: in the timeline's own time."""
    ends, held = [0] * timeline.schedule.ranks, list(levels.before)
    needed = last_needs(timeline)
    for index, (rank, step, start_us, end_us) in enumerate(timeline.compute):
        parts, need = flatten(step), needed[index]
        start, end = round(start_us / tick), round(end_us / tick)
        giver = sent = late = 0
        if need is not None:
            giver = index - need.giver
            gave = round(timeline.compute[need.giver].end_us / tick)
            sent, late = round(need.sent_us / tick) - gave, round(need.arrived_us / tick)
            late -= sent + gave
        during, after = levels.during[index], levels.after[index]
        yield _Row(
            sort=sorts.setdefault((rank, *(part[:2] for part in parts)), len(sorts)),
            microbatch=parts[0].microbatch,
            second=parts[-1].microbatch,
            gap=start - ends[rank],
            length=end - start,
            giver=giver,
            sent=sent,
            late=late,
            rise=during - held[rank],
            fall=after - during,
        )
        ends[rank], held[rank] = end, after


def _tick(length: float) -> float:
    """A power of ten, so that times of few digits stay what they are."""
    power = -9
    while 10.0**power * _TICKS < length:
        power += 1
    return 10.0**power


def _part(kind: Kind, stage: int, rank: int, chunks: Chunks) -> list[str | int]:
    colour = fill(kind, chunks.lightness(rank, Action(kind, stage, 0)))
    return [kind, stage, colour, ink(colour)]
