"""What the ranks of a schedule hold at most, for many or large ones: whole columns at once.

The same numbers as `peak_memory` and `Timeline.peak_activations`, which follow from the orders."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from npu_pipe.ir.action import Kind
from npu_pipe.ir.check import prove_schedule
from npu_pipe.ir.needs import KINDS, Table
from npu_pipe.ir.schedule import Schedule
from npu_pipe.simulator.memory import Memory, Peak

__all__ = ["activation_peaks", "schedule_peaks"]

Floats = npt.NDArray[np.float64]

_F, _B, _I, _W = (KINDS.index(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W))


def schedule_peaks(schedule: Schedule, memory: Memory) -> tuple[Peak, ...]:
    """The peak of each rank, transfer buffers left out. Raises ScheduleError, CostsError."""
    table = prove_schedule(schedule).table
    memory.check_fits(schedule)
    kept, freed = _changes(table, memory, is_training=schedule.training)
    peaks = []
    for rank, (most, row) in enumerate(_peaks(table, kept, freed)):
        parameters = sum(memory.parameters[stage] for stage in schedule.stages_of(rank))
        action = table.action(row) if most > 0 else None
        peaks.append(Peak(rank, parameters + max(most, 0.0), parameters, action))
    return tuple(peaks)


def activation_peaks(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the stage activations held at once. Raises ScheduleError."""
    table = prove_schedule(schedule).table
    last = (_B, _W) if schedule.training else (_F,)
    kept, freed = (np.isin(table.kind, kinds).astype(float) for kinds in ((_F,), last))
    return tuple(int(most) for most, _ in _peaks(table, kept, freed))


def _peaks(table: Table, kept: Floats, freed: Floats) -> Iterator[tuple[float, int]]:
    """Per rank, the most that is there, and the first row with it."""
    for begin, end in pairwise(table.starts.tolist()):
        held = np.cumsum(kept[begin:end]) - (np.cumsum(freed[begin:end]) - freed[begin:end])
        at = int(np.argmax(held))
        yield float(held[at]), begin + at


def _changes(table: Table, memory: Memory, *, is_training: bool) -> tuple[Floats, Floats]:
    """Per row, what it adds when it begins and what goes when it has ended."""
    scale = np.array(memory.microbatch_scale)[table.microbatch] if memory.microbatch_scale else 1.0
    activation = np.array(memory.activation)[table.stage] * scale
    weight_inputs = np.array(memory.weight_inputs)[table.stage] * scale
    kind = table.kind
    kept = np.select([kind == _F, kind == _I], [activation, weight_inputs], 0.0)
    last = (_B, _I) if is_training else (_F,)
    freed = np.select([np.isin(kind, last), kind == _W], [activation, weight_inputs], 0.0)
    return kept, freed
