"""A timeline in a line or two of words."""

from __future__ import annotations

from npu_pipe.ir.schedule import Schedule
from npu_pipe.timeline.timeline import Timeline
from npu_pipe.timeline.times import time_scale

__all__ = ["headline", "summary"]


def headline(schedule: Schedule) -> str:
    """Its name and sizes: "interleaved-1f1b: 4 ranks, 8 stages, 8 microbatches"."""
    stages = _count(schedule.stages, "stage")
    sizes = [_count(schedule.ranks, "rank"), stages, _count(schedule.microbatches, "microbatch")]
    if schedule.stages == schedule.ranks:
        sizes.remove(stages)
    # A name may come from a file: no control characters to a terminal.
    name = "".join(letter if letter.isprintable() else " " for letter in schedule.name)
    return f"{name}: {', '.join(sizes)}"


def summary(timeline: Timeline) -> str:
    """Makespan, bubble and the highest peak."""
    return (
        f"makespan {time_scale(timeline).text(timeline.makespan)}, "
        f"bubble {timeline.bubble_ratio:.1%}, peak activations {max(timeline.peak_activations)}"
    )


def _count(number: int, noun: str) -> str:
    ending = "es" if noun.endswith("h") else "s"
    return f"{number} {noun}{ending if number != 1 else ''}"
