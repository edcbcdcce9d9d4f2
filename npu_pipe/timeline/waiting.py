"""Waiting: when ranks stood still for a transfer, and for whom.

rank 1   | 1F2 |<-- wait -->| 1F3 |         for 1RECV_F3, from rank 0

The runtime records its waits. A predicted timeline has none recorded: there a rank waits from
the end of a step until what the next one needs is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from npu_pipe.ir.action import Action, flatten
from npu_pipe.ir.plan import input_of
from npu_pipe.ir.program import route
from npu_pipe.timeline.flight import flights
from npu_pipe.timeline.last_needs import last_needs
from npu_pipe.timeline.timeline import Timeline

__all__ = ["Wait", "waits_of"]


class Wait(NamedTuple):
    """rank stood still until `receive` came from rank `source`.

    step: index, among the compute spans, of the step that could not begin.
    flight_us: for how much of it the transfer was under way. The rest it waited for `source`
        to begin.
    """

    step: int
    rank: int
    source: int
    receive: Action
    start_us: float
    end_us: float
    flight_us: float


def waits_of(timeline: Timeline) -> tuple[Wait, ...]:
    """All waits, recorded ones if the timeline has some, in the order of the compute spans."""
    flying = flights(timeline)
    found = _recorded(timeline) if timeline.waits else _between(timeline)
    waits = []
    for index, receive, start_us, end_us in found:
        source, target, _ = route(timeline.schedule, receive)
        flight = flying.get(receive)
        flight_us = 0.0
        if flight is not None:
            flight_us = min(end_us, flight.end_us) - max(start_us, flight.start_us)
        waits.append(Wait(index, target, source, receive, start_us, end_us, max(flight_us, 0.0)))
    return tuple(waits)


_Found = tuple[int, Action, float, float]


def _recorded(timeline: Timeline) -> Iterator[_Found]:
    takers = {
        receive: index
        for index, span in enumerate(timeline.compute)
        for action in flatten(span.action)
        if (receive := input_of(timeline.schedule, action)) is not None
    }
    known = [span for span in timeline.waits if span.action in takers]
    known.sort(key=lambda span: (takers[_action(span.action)], span.start_us))
    for span in known:
        receive = _action(span.action)
        if span.end_us > span.start_us:
            yield takers[receive], receive, span.start_us, span.end_us


def _between(timeline: Timeline) -> Iterator[_Found]:
    schedule = timeline.schedule
    ended = [0.0] * schedule.ranks
    for index, (span, need) in enumerate(zip(timeline.compute, last_needs(timeline), strict=True)):
        before_us, ended[span.rank] = ended[span.rank], span.end_us
        if need is None or need.receive is None or span.start_us <= before_us:
            continue
        giver = timeline.compute[need.giver]
        if giver.rank == span.rank:
            continue
        # Without transfers in the timeline it is not known when things arrive.
        there_us = need.arrived_us if timeline.transfers else span.start_us
        end_us = min(max(there_us, before_us), span.start_us)
        if end_us > before_us:
            yield index, need.receive, before_us, end_us


def _action(step: object) -> Action:
    assert isinstance(step, Action)
    return step
