"""What each step of a timeline needed last, and when that was there.

rank 1   |  1F3  |                 ended_us 4
                 \\  1SEND_F3       sent_us 4, the start of the transfer
rank 2   | 2B0 |   \\| 2F3 |        arrived_us 5; 2F3 stood still since the end of 2B0
"""

from __future__ import annotations

from typing import NamedTuple

from npu_pipe.ir.action import Action, Kind, flatten
from npu_pipe.ir.needs import needs
from npu_pipe.ir.plan import input_of
from npu_pipe.ir.program import peer_of
from npu_pipe.timeline.timeline import Timeline

__all__ = ["Need", "last_needs"]


class Need(NamedTuple):
    """Of all that a step needs, what was there last.

    giver: index, among the compute spans, of the step that gave it.
    sent_us, arrived_us: start and end of the transfer that brought it. Within a rank, or where
        the timeline has no transfers, both are the end of the giver.
    receive: the RECV that names it; a fused pair may have both inputs from one giver. None for
        what the step's own stage gave.
    """

    giver: int
    sent_us: float
    arrived_us: float
    receive: Action | None


def last_needs(timeline: Timeline) -> tuple[Need | None, ...]:
    """Per compute span; None for what needs only the batch."""
    places: dict[Action, int] = {}
    for index, span in enumerate(timeline.compute):
        for action in flatten(span.action):
            places[action] = index
            if action.kind is Kind.B:  # gives what an I gives
                places[action._replace(kind=Kind.I)] = index
    transfers = {span.action: span for span in timeline.transfers}
    schedule = timeline.schedule

    def there(action: Action, needed: Action) -> Need | None:
        index = places.get(needed)
        if index is None:  # a timeline may be of a part of a window
            return None
        giver = timeline.compute[index]
        receive = input_of(schedule, action) if needed.stage != action.stage else None
        if receive is not None:
            arrival, start = transfers.get(receive), transfers.get(peer_of(receive))
            if arrival is not None and start is not None:
                return Need(index, start.start_us, arrival.end_us, receive)
        return Need(index, giver.end_us, giver.end_us, receive)

    last: list[Need | None] = []
    for span in timeline.compute:
        found = (
            there(action, needed)
            for action in flatten(span.action)
            for needed in needs(action, schedule.stages)
        )
        last.append(max((need for need in found if need), key=_arrival, default=None))
    return tuple(last)


def _arrival(need: Need) -> float:
    return need.arrived_us
