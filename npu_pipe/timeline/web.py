"""What each span of compute and each transfer had to wait for, in the order that a program gives.

step        the step before it on its rank; the transfers of its inputs
transfer    the step that issued it; the one before it between the same two ranks;
            what the step waited for whose beginning posted its receive
"""

from __future__ import annotations

from npu_pipe.ir.action import Action, flatten
from npu_pipe.ir.plan import rank_plan
from npu_pipe.ir.program import Program, peer_of, route
from npu_pipe.timeline.flight import Flight, flights
from npu_pipe.timeline.timeline import Span, Timeline

__all__ = ["Web"]


class Web:
    """The waits of one timeline, looked up backwards."""

    def __init__(self, timeline: Timeline, program: Program) -> None:
        self._flights = flights(timeline)
        transfers = {span.action: span for span in timeline.transfers}
        # When a receive was posted, where its span shows it: not where both ends show the flight.
        self._posted_us = {
            receive: transfers[receive].start_us
            for receive in self._flights
            if transfers[receive][2:] != transfers[peer_of(receive)][2:]
        }
        self._spans = {action: span for span in timeline.compute for action in flatten(span.action)}
        self._previous: dict[Span, Span] = {}
        for track in timeline.tracks():
            self._previous.update(zip(track[1:], track, strict=False))
        self._brought: dict[Span, list[Action]] = {}
        self._issuer: dict[Action, Action] = {}
        self._poster: dict[Action, Action] = {}
        self._ahead: dict[Action, Action] = {}  # RECV -> the RECV before it between two ranks
        last: dict[tuple[int, int], Action] = {}
        for rank in range(program.schedule.ranks):
            for todo in rank_plan(program, rank).instructions:
                if todo.takes is not None and todo.is_far_take and todo.action in self._spans:
                    self._brought.setdefault(self._spans[todo.action], []).append(todo.takes)
                for send in todo.sends:
                    receive = peer_of(send)
                    self._issuer[receive] = todo.action
                    pair = route(program.schedule, send)[:2]
                    if pair in last:
                        self._ahead[receive] = last[pair]
                    last[pair] = receive
                self._poster.update(dict.fromkeys(todo.posts, todo.action))

    def before(self, node: Span | Flight) -> Span | Flight | None:
        """Of all that it waited for, what ended last; None for what could begin at once."""
        return self._before_flight(node) if isinstance(node, Flight) else self._before_span(node)

    def _before_span(self, span: Span) -> Span | Flight | None:
        found: Span | Flight | None = self._previous.get(span)
        for receive in self._brought.get(span, ()):
            flight = self._flights.get(receive)
            if flight is not None and (found is None or flight.end_us > found.end_us):
                found = flight
        return found

    def _before_flight(self, flight: Flight) -> Span | Flight | None:
        receive = flight.receive
        found: Span | Flight | None = self._spans.get(self._issuer.get(receive, receive))
        ahead = self._flights.get(self._ahead.get(receive, receive))
        if ahead is not None and ahead.receive != receive and ahead.end_us <= flight.start_us:
            found = ahead if found is None or ahead.end_us > found.end_us else found
        poster = self._spans.get(self._poster.get(receive, receive))
        if poster is None:
            return found
        posted_us = self._posted_us.get(receive, poster.start_us)
        if posted_us > flight.start_us or (found is not None and found.end_us >= posted_us):
            return found
        opened = self._before_span(poster)
        if opened is None or (isinstance(opened, Flight) and opened.receive == receive):
            return found  # heard of only when it was taken
        return opened
