"""What the simulation makes of a few means of one measured window.

A step takes what it keeps its rank for: from the end of the step before it, or of the wait for
its input, to its own end. So what the runtime does between two steps is in it.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean

from npu_pipe import Action, Costs, Kind, Timeline, lower, simulate
from npu_pipe.timeline.flight import flights

__all__ = ["forecast_us"]

_TAKING_US = 100.0  # a wait up to this long is the taking of what is there


def forecast_us(measured: Timeline) -> float:
    """The makespan by the mean F, B, I and W of each stage and the mean transfer."""
    schedule = measured.schedule
    took = _kept_us(measured)

    def means(kind: Kind) -> list[float]:
        return [fmean(took.get((kind, s), [0.0])) for s in range(schedule.stages)]

    whole = means(Kind.B)
    transfer = fmean(flight.took_us for flight in flights(measured).values())
    costs = Costs(
        forward=means(Kind.F),
        input_grad=[half or both for half, both in zip(means(Kind.I), whole, strict=True)],
        weight_grad=means(Kind.W),
        transfer=[transfer] * (schedule.stages - 1),
    )
    return simulate(lower(schedule, costs), costs).makespan


def _kept_us(measured: Timeline) -> dict[tuple[Kind, int], list[float]]:
    took: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for rank in range(measured.schedule.ranks):
        waits = [
            wait
            for wait in measured.waits
            if wait.rank == rank and wait.end_us - wait.start_us > _TAKING_US
        ]
        free_us: float | None = None
        for span in measured.compute:
            if span.rank != rank:
                continue
            assert isinstance(span.action, Action)
            start_us = span.start_us if free_us is None else free_us
            ends = [w.end_us for w in waits if start_us <= w.start_us and w.end_us <= span.start_us]
            took[span.action.kind, span.action.stage].append(span.end_us - max([*ends, start_us]))
            free_us = span.end_us
    return took
