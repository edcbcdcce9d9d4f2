"""How full each rank's memory is over time: in activations here, in bytes from the simulator."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from npu_pipe.ir.action import Kind, flatten
from npu_pipe.timeline.timeline import Timeline

__all__ = ["Levels", "Unit", "held_activations"]


class Unit(enum.StrEnum):
    """What levels count."""

    ACTIVATIONS = "activations"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Levels:
    """What ranks hold.

    unit: of all three.
    before: per rank, what it holds before its first step.
    during, after: per compute span of the timeline, what its rank holds from the start of the
        step, and from its end on.
    """

    unit: Unit
    before: tuple[float, ...]
    during: tuple[float, ...]
    after: tuple[float, ...]


def held_activations(timeline: Timeline) -> Levels:
    """The stage activations held, by the rule of `Timeline.peak_activations`."""
    last = (Kind.B, Kind.W) if timeline.schedule.training else (Kind.F,)
    held = [0] * timeline.schedule.ranks
    during, after = [], []
    for rank, step, _, _ in timeline.compute:
        kinds = [action.kind for action in flatten(step)]
        held[rank] += kinds.count(Kind.F)
        during.append(held[rank])
        held[rank] -= sum(kind in last for kind in kinds)
        after.append(held[rank])
    return Levels(Unit.ACTIVATIONS, (0,) * len(held), tuple(during), tuple(after))
