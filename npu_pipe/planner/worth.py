"""Whether to have a pipeline at all: what it loses, and to what.

A scheduler only shares out the idle time; with few microbatches, a small p or a model that fits
one device, not having a pipeline may be better. [third seed, section 14]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from npu_pipe.api import simulate
from npu_pipe.planner.assess import Assessment
from npu_pipe.planner.limits import Limits, giga
from npu_pipe.planner.workload import Workload
from npu_pipe.schedules.registry import FAMILIES, build_if_covered

__all__ = ["GOOD_BUBBLE", "Worth", "judge"]

GOOD_BUBBLE = 0.10
_LARGE_BUBBLE = 0.20
_MANY = 10_000  # actions of a chunk above which a number of microbatches is not tried out


@dataclass(frozen=True, slots=True)
class Worth:
    """speedup: over one device that runs the microbatches one after another.

    copies_time: of data-parallel copies of the model on the same ranks, their reduction of
        gradients left out. one_device_bytes: what such a copy holds; None if not known.
    fits_one_device: None if that is not known.
    microbatches: from how many on this schedule's bubble is GOOD_BUBBLE or less; None if never.
    sentences: the same in words.
    """

    speedup: float
    copies_time: float
    one_device_bytes: float | None
    fits_one_device: bool | None
    microbatches: int | None
    sentences: tuple[str, ...]


def judge(row: Assessment, workload: Workload, limits: Limits) -> Worth:
    """Compare a schedule with not having a pipeline."""
    alone, ranks = sum(row.busy), row.schedule.ranks
    copies_time, held = alone / ranks, _one_device_bytes(workload)
    fits = None if held is None or limits.memory_bytes is None else held <= limits.memory_bytes
    needed = _microbatches(row, workload)
    worth = Worth(alone / row.makespan, copies_time, held, fits, needed, ())
    if ranks == 1:
        sentences = ["One rank is no pipeline: all schedules are gradient accumulation."]
    else:
        sentences = [
            *_speed(row, worth),
            *_bubble(row, worth),
            *_copies(row, worth, limits.memory_bytes),
        ]
    return replace(worth, sentences=tuple(sentences))


def _speed(row: Assessment, worth: Worth) -> list[str]:
    ranks = row.schedule.ranks
    if worth.speedup <= 1:
        return [
            f"Pipeline parallelism is not worth it: {ranks} ranks are no faster than one device "
            f"({worth.speedup:.2f} times)."
        ]
    return [f"{ranks} ranks do the work of {worth.speedup:.3g} devices."]


def _bubble(row: Assessment, worth: Worth) -> list[str]:
    if row.bubble_ratio <= _LARGE_BUBBLE:
        return []
    if worth.microbatches is None:
        excess = max(row.busy) / (sum(row.busy) / len(row.busy)) - 1
        return [
            f"Its bubble is {row.bubble_ratio:.1%}, and no number of microbatches brings it to "
            f"{GOOD_BUBBLE:.0%}: the busiest rank has {excess:.0%} more work than the mean. Cut "
            "the model more evenly."
        ]
    return [
        f"Its bubble is {row.bubble_ratio:.1%}: m = {row.schedule.microbatches} is little for "
        f"{row.schedule.ranks} ranks; use m >= {worth.microbatches} for {GOOD_BUBBLE:.0%}."
    ]


def _copies(row: Assessment, worth: Worth, limit_bytes: float | None) -> list[str]:
    ranks, scale = row.schedule.ranks, row.scale
    if worth.fits_one_device is False and worth.one_device_bytes and limit_bytes:
        return [
            f"One device would have to hold {giga(worth.one_device_bytes)}, and has room for "
            f"{giga(limit_bytes)}: the model has to be split."
        ]
    lost = row.makespan - worth.copies_time
    text = (
        f"{ranks} data-parallel copies take {scale.text(worth.copies_time)} and their reduction of "
        f"gradients; a pipeline pays only if that reduction takes longer than {scale.text(lost)}."
    )
    if worth.fits_one_device and worth.one_device_bytes:
        held = giga(worth.one_device_bytes)
        return [
            f"The model fits one device ({held}), so pipeline parallelism may not be worth it: "
            f"{text}"
        ]
    return [f"If the model fits one device: {text}"]


def _one_device_bytes(workload: Workload) -> float | None:
    """Parameters and the activations of one microbatch."""
    memory = workload.stage_memory(1)
    if memory is None:
        return None
    scale = max(memory.microbatch_scale, default=1.0)
    return memory.parameters[0] + memory.activation[0] * scale


def _microbatches(row: Assessment, workload: Workload) -> int | None:
    """The least number that gives a good bubble, by how the makespan grows with m; then tried.

    What the makespan is longer than the busiest rank's work stays as m grows.
    """
    m, schedule = row.schedule.microbatches, row.schedule
    busiest, mean = max(row.busy) / m, sum(row.busy) / len(row.busy) / m
    gain = mean - (1 - GOOD_BUBBLE) * busiest
    idle = row.makespan - m * busiest
    if gain <= 0:
        return None
    least = max(math.ceil((1 - GOOD_BUBBLE) * idle / gain), 1)
    if workload.microbatch_scale or schedule.name not in FAMILIES:
        return least
    costs = workload.stage_costs(schedule.stages)
    for number in range(least, least + 4 * schedule.ranks):
        larger = build_if_covered(
            schedule.name, ranks=schedule.ranks, microbatches=number, chunks=row.chunks
        )
        if larger is not None and (
            schedule.ranks * number > _MANY or simulate(larger, costs).bubble_ratio <= GOOD_BUBBLE
        ):
            return number
    return least
