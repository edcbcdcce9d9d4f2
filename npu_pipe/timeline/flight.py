"""Flights: when each transfer was really under way.

sender    | 1F3 |<------ 1SEND_F3 ------>|           since it was issued, until it is known to end
receiver    |<----------- 2RECV_F3 ------------->|   since it was posted, until it was taken
flight          |=============|                      since both were there, until it arrived

Where both ends have one span, as simulated, or as measured by the one that copied, that is the
flight. Else the arrival is seen only by who waits for it. One that nobody waited for came earlier
than it was taken, how much is not known: it is given the shortest time seen on its boundary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from npu_pipe.ir.action import Action
from npu_pipe.ir.program import peer_of
from npu_pipe.timeline.timeline import Span, Timeline

__all__ = ["Flight", "flights"]

_TAKING_US = 100.0  # a measured wait up to this long may be the taking of what is there


class Flight(NamedTuple):
    """One transfer under way. receive: its name at the end where it arrives."""

    receive: Action
    source: int
    target: int
    start_us: float
    end_us: float

    @property
    def took_us(self) -> float:
        return self.end_us - self.start_us


def flights(timeline: Timeline) -> dict[Action, Flight]:
    """Every transfer of which the timeline has both ends, by its RECV."""
    spans: dict[Action, Span] = {}
    for span in timeline.transfers:
        assert isinstance(span.action, Action)
        spans[span.action] = span
    waits = {span.action: span for span in timeline.waits}
    found: dict[Action, Flight] = {}
    unseen: list[Action] = []
    for action, receive in spans.items():
        send = spans.get(peer_of(action)) if action.kind.is_receive else None
        if send is None:
            continue
        start_us = max(send.start_us, receive.start_us)
        end_us = max(receive.end_us, start_us)
        found[action] = Flight(action, send.rank, receive.rank, start_us, end_us)
        if send[2:] != receive[2:] and not _is_seen(waits.get(action), start_us):
            unseen.append(action)
    shortest = _shortest(found)
    for action in unseen:
        flight = found[action]
        took_us = min(shortest[_boundary(action)], flight.took_us)
        found[action] = flight._replace(end_us=flight.start_us + took_us)
    return found


def _is_seen(wait: Span | None, start_us: float) -> bool:
    """Whether its arrival ended a wait."""
    if wait is None:
        return False
    return wait.start_us < start_us or wait.end_us - wait.start_us > _TAKING_US


def _shortest(found: Mapping[Action, Flight]) -> dict[int, float]:
    """Per boundary, both ways."""
    shortest: dict[int, float] = {}
    for action, flight in found.items():
        key = _boundary(action)
        shortest[key] = min(flight.took_us, shortest.get(key, flight.took_us))
    return shortest


def _boundary(receive: Action) -> int:
    """The stage before it."""
    return min(receive.stage, peer_of(receive).stage)
