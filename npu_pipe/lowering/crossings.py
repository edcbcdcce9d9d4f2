"""The transfers that a schedule calls for, and what makes room to receive them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from npu_pipe.ir.check import at_row
from npu_pipe.ir.deadlock import transfers_of
from npu_pipe.ir.needs import KINDS, Table
from npu_pipe.ir.schedule import Schedule

__all__ = ["Crossings", "Ticks", "crossings_of"]

Ints = npt.NDArray[np.int64]


class Crossings(NamedTuple):
    """One entry a transfer.

    producer to target_rank: see `transfers_of`. consumer: the row that takes what arrives.
    gate: the row whose beginning makes room to receive it, -1 for none.
    """

    producer: Ints
    kind: Ints
    stage: Ints
    target: Ints
    source_rank: Ints
    target_rank: Ints
    consumer: Ints
    gate: Ints


class Ticks(NamedTuple):
    """On one clock: per row of compute, the same for both halves of a pair; per transfer."""

    compute: Ints
    transfers: Ints


def crossings_of(schedule: Schedule, table: Table, prefetch: int) -> Crossings:
    """Raises ScheduleError for a fused pair that takes more of a lane than prefetch allows."""
    producer, kind, stage, target, source_rank, target_rank = transfers_of(schedule, table)
    where = table.where(schedule.stages, schedule.microbatches)
    consumer = where[np.where(kind == _SEND_F, _F, _I), target, table.microbatch[producer]]
    # The n-th input of a lane waits for the start of the consumer of input n - prefetch.
    lane = target_rank * 2 + (target_rank > source_rank)
    by_use = np.lexsort((consumer, lane))
    ahead, later = by_use[:-prefetch], by_use[prefetch:]
    same = lane[ahead] == lane[later]
    ahead, later = ahead[same], later[same]
    for row in consumer[later[table.lead[consumer[ahead]] == table.lead[consumer[later]]]][:1]:
        raise at_row(
            table,
            row,
            "a rank holds all inputs of a step before it begins",
            f"its fused pair takes two of one lane, and prefetch is {prefetch}",
            "give prefetch of at least 2",
        )
    gate = np.full(len(producer), -1, dtype=np.int64)
    gate[later] = consumer[ahead]
    return Crossings(producer, kind, stage, target, source_rank, target_rank, consumer, gate)


_F, _I = (KINDS.index(kind) for kind in ("F", "I"))
_SEND_F = KINDS.index("SEND_F")
