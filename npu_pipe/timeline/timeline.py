"""Timeline: when each action ran, predicted or measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from npu_pipe.ir.action import FusedPair, Kind, Step, flatten
from npu_pipe.ir.schedule import Schedule
from npu_pipe.timeline.phase import PhaseSpan

__all__ = ["Span", "Timeline"]


class Span(NamedTuple):
    """One step on one rank. Times are microseconds, or the unit that the costs were given in."""

    rank: int
    action: Step
    start_us: float
    end_us: float

    @property
    def is_compute(self) -> bool:
        return isinstance(self.action, FusedPair) or self.action.kind.is_compute


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans of compute and of transfers; where it was measured, of waits and phases too.

    schedule: what was run; it tells the lane of a transfer.
    compute: the spans of compute, rank after rank, each rank's in the order they ran.
    transfers: the spans of SENDs and RECVs, likewise.
    waits: per RECV that a rank has taken, from when it began to take it until it had it.
    phases: what else the ranks did in the step, after the window too.
    Time 0 is the start of the window, the same on all ranks.
    """

    schedule: Schedule
    compute: tuple[Span, ...]
    transfers: tuple[Span, ...] = ()
    waits: tuple[Span, ...] = ()
    phases: tuple[PhaseSpan, ...] = ()

    @property
    def makespan(self) -> float:
        """End of the last action from time 0."""
        return max((span.end_us for span in self.compute), default=0.0)

    @property
    def step_us(self) -> float:
        """End of the last action or phase from time 0: with what follows the window."""
        return max(self.makespan, *(span.end_us for span in self.phases), 0.0)

    @property
    def span(self) -> float:
        """The largest, over ranks, of last end - first start. [Qi et al. 2401.10241]"""
        return max((track[-1].end_us - track[0].start_us for track in self.tracks()), default=0.0)

    @property
    def bubble_ratio(self) -> float:
        """1 - busy time / (ranks x makespan)."""
        busy = sum(span.end_us - span.start_us for span in self.compute)
        area = self.schedule.ranks * self.makespan
        return 1 - busy / area if area else 0.0

    @property
    def busy_us(self) -> tuple[float, ...]:
        """Per rank, the time it computed."""
        busy = [0.0] * self.schedule.ranks
        for span in self.compute:
            busy[span.rank] += span.end_us - span.start_us
        return tuple(busy)

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """Per rank, the stage activations held at once: from F's start to the end of B or W.

        An evaluation keeps none after its F.
        """
        last = (Kind.B, Kind.W) if self.schedule.training else (Kind.F,)
        held = [0] * self.schedule.ranks
        peak = list(held)
        for rank, step, _, _ in self.compute:
            for action in flatten(step):
                held[rank] += action.kind is Kind.F
                peak[rank] = max(peak[rank], held[rank])
                held[rank] -= action.kind in last
        return tuple(peak)

    def tracks(self) -> list[tuple[Span, ...]]:
        """The compute spans of each rank that has some."""
        tracks: dict[int, list[Span]] = {}
        for span in self.compute:
            tracks.setdefault(span.rank, []).append(span)
        return [tuple(tracks[rank]) for rank in sorted(tracks)]
