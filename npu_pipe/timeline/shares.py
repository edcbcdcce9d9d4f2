"""How a rank spends its time, column by column: for pictures too small for single bars."""

from __future__ import annotations

import math

from npu_pipe.ir.action import Kind, flatten
from npu_pipe.timeline.timeline import Timeline

__all__ = ["shares"]


def shares(timeline: Timeline, columns: int) -> list[list[dict[Kind, float]]]:
    """Per rank and column of equal time, the share (0 to 1) that each kind has of it.

    What is missing to 1 is idle. A fused pair counts half for each of its kinds.
    """
    step = (timeline.makespan or 1.0) / columns
    parts: list[list[dict[Kind, float]]] = [
        [{} for _ in range(columns)] for _ in range(timeline.schedule.ranks)
    ]
    for rank, action, start, end in timeline.compute:
        kinds = [part.kind for part in flatten(action)]
        last = min(math.ceil(end / step), columns)
        for column in range(math.floor(start / step), last):
            held = (min(end, (column + 1) * step) - max(start, column * step)) / step
            here = parts[rank][column]
            for kind in kinds:
                here[kind] = here.get(kind, 0.0) + held / len(kinds)
    return [[_sorted(column) for column in track] for track in parts]


def _sorted(column: dict[Kind, float]) -> dict[Kind, float]:
    return {kind: column[kind] for kind in Kind if column.get(kind, 0.0) > 1e-9}
