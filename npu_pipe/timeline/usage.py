"""How each rank spent the window: busy, waiting and for whom, idle; its transfers and phases."""

from __future__ import annotations

from dataclasses import dataclass

from npu_pipe.ir.action import Action
from npu_pipe.timeline.flight import flights
from npu_pipe.timeline.phase import Phase
from npu_pipe.timeline.timeline import Timeline
from npu_pipe.timeline.waiting import Wait, waits_of

__all__ = ["RankUse", "WaitedFor", "usage"]


@dataclass(frozen=True, slots=True)
class WaitedFor:
    """All waits of a rank for one kind of transfer.

    source: the rank that sends it. longest: the RECV that took longest, for longest_us.
    flight_us: the part of waiting_us in which the transfer was under way.
    """

    source: int
    waiting_us: float
    flight_us: float
    longest: Action
    longest_us: float


@dataclass(frozen=True, slots=True)
class RankUse:
    """busy_us + waiting_us + idle_us is the makespan.

    idle_us: neither computing nor waiting for a transfer: before its first and after its last
        step, and what the runtime takes between two.
    hidden_us, exposed_us: of the transfers that it receives, the time under way while it
        computed (or was idle), and while it waited for them.
    waited_for: the longest first. phases: the time of each that it had.
    """

    rank: int
    busy_us: float
    waiting_us: float
    idle_us: float
    hidden_us: float
    exposed_us: float
    waited_for: tuple[WaitedFor, ...]
    phases: tuple[tuple[Phase, float], ...]


def usage(timeline: Timeline) -> tuple[RankUse, ...]:
    """One a rank."""
    ranks = range(timeline.schedule.ranks)
    waits: list[list[Wait]] = [[] for _ in ranks]
    for wait in waits_of(timeline):
        waits[wait.rank].append(wait)
    flying = [0.0 for _ in ranks]
    for flight in flights(timeline).values():
        flying[flight.target] += flight.took_us
    uses = []
    for rank in ranks:
        busy_us = timeline.busy_us[rank]
        waiting_us = sum(wait.end_us - wait.start_us for wait in waits[rank])
        exposed_us = sum(wait.flight_us for wait in waits[rank])
        uses.append(
            RankUse(
                rank,
                busy_us=busy_us,
                waiting_us=waiting_us,
                idle_us=timeline.makespan - busy_us - waiting_us,
                hidden_us=flying[rank] - exposed_us,
                exposed_us=exposed_us,
                waited_for=_waited_for(waits[rank]),
                phases=_phases(timeline, rank),
            )
        )
    return tuple(uses)


def _waited_for(waits: list[Wait]) -> tuple[WaitedFor, ...]:
    groups: dict[tuple[int, str, int], list[Wait]] = {}
    for wait in waits:
        groups.setdefault((wait.source, wait.receive.kind, wait.receive.stage), []).append(wait)
    found = []
    for group in groups.values():
        longest = max(group, key=lambda wait: wait.end_us - wait.start_us)
        found.append(
            WaitedFor(
                longest.source,
                waiting_us=sum(wait.end_us - wait.start_us for wait in group),
                flight_us=sum(wait.flight_us for wait in group),
                longest=longest.receive,
                longest_us=longest.end_us - longest.start_us,
            )
        )
    return tuple(sorted(found, key=lambda each: -each.waiting_us))


def _phases(timeline: Timeline, rank: int) -> tuple[tuple[Phase, float], ...]:
    took: dict[Phase, float] = {}
    for span in timeline.phases:
        if span.rank == rank:
            took[span.phase] = took.get(span.phase, 0.0) + span.end_us - span.start_us
    return tuple((phase, took[phase]) for phase in Phase if phase in took)
