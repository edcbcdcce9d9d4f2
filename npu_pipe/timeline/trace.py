"""Chrome trace-event JSON, as Perfetto and MindStudio Insight open it.

    process 'rank 0'   compute        |2F0   |2F1   |      |2B0        |
                       waiting                      |2RECV_B0|          for whom, in its details
                       phases                                          |optimizer|
                       down: send            |2SEND_F0|
                       up: receive                |2RECV_B0|
    process 'rank 1'   ...                          arrows from each send to its receive

Slices of one track may nest but not overlap. Transfers do overlap where a rank talks to two
others in one lane, or posts receives ahead; they then get a second track of the same name.
Format: "Trace Event Format", Google, https://perfetto.dev/docs/getting-started/other-formats.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from npu_pipe.files import write_whole
from npu_pipe.ir.action import Action, FusedPair, Kind
from npu_pipe.ir.program import peer_of, route
from npu_pipe.timeline.timeline import Span, Timeline
from npu_pipe.timeline.waiting import waits_of

__all__ = ["chrome_trace", "write_trace"]

Event = dict[str, Any]

# Names from the fixed palette of the format; only chrome://tracing and its heirs show them.
_COLOURS = {
    Kind.F: "thread_state_running",
    Kind.B: "rail_response",
    Kind.I: "rail_animation",
    Kind.W: "rail_idle",
    Kind.SEND_F: "thread_state_runnable",
    Kind.RECV_F: "thread_state_runnable",
    Kind.SEND_B: "thread_state_iowait",
    Kind.RECV_B: "thread_state_iowait",
}


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as a JSON value. Times are microseconds, rounded to nanoseconds.

    Events are sorted by time; where times are equal a slice stands before the flow event that
    binds to it, and the start of a flow before its end.
    """
    schedule = timeline.schedule
    names: list[Event] = []
    threads: dict[Span, int] = {}
    events: list[Event] = []
    standing = _standing(timeline)
    for rank, rows in enumerate(_rows(timeline)):
        names += _metadata(rank, 0, "process", f"rank {rank}")
        tracks = [(name, track) for name in sorted(rows) for track in _side_by_side(rows[name])]
        last_compute = sum(name == "compute" for name, _ in tracks)
        tracks[last_compute:last_compute] = [(name, []) for name in sorted(standing[rank])][::-1]
        for thread, (name, track) in enumerate(tracks):
            names += _metadata(rank, thread, "thread", name)
            threads |= dict.fromkeys(track, thread)
            events += [{**event, "tid": thread} for event in standing[rank].get(name, ())]
    events += [_slice(span, threads[span]) for span in timeline.compute]
    events += _transfers(timeline.transfers, threads)
    events.sort(key=lambda event: float(event["ts"]))
    return {
        "traceEvents": names + events,
        "displayTimeUnit": "ms",
        "otherData": {
            "schedule": schedule.name,
            "ranks": schedule.ranks,
            "stages": schedule.stages,
            "microbatches": schedule.microbatches,
        },
    }


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write `chrome_trace` to a file. Raises ConfigError when it cannot be written."""
    write_whole(json.dumps(chrome_trace(timeline), separators=(",", ":")) + "\n", path)


def _rows(timeline: Timeline) -> list[dict[str, list[Span]]]:
    """Per rank, its spans by the name of their row; the names sort as they shall stand."""
    rows: list[dict[str, list[Span]]] = [{"compute": []} for _ in range(timeline.schedule.ranks)]
    for span in timeline.compute:
        rows[span.rank]["compute"].append(span)
    for span in timeline.transfers:
        assert isinstance(span.action, Action)
        way = "send" if span.action.kind.is_send else "receive"
        name = f"{route(timeline.schedule, span.action).lane}: {way}"
        rows[span.rank].setdefault(name, []).append(span)
    return rows


def _standing(timeline: Timeline) -> list[dict[str, list[Event]]]:
    """Per rank, the slices of its waits and phases by the name of their track, if it has some."""
    found: list[dict[str, list[Event]]] = [{} for _ in range(timeline.schedule.ranks)]
    for span in timeline.phases:
        event = {
            "ph": "X",
            "name": span.phase.value,
            "cat": "phase",
            **_place(span.rank, *span[2:]),
        }
        found[span.rank].setdefault("phases", []).append(event)
    for wait in waits_of(timeline):
        event = {
            "ph": "X",
            "name": str(wait.receive),
            "cat": "waiting",
            **_place(wait.rank, wait.start_us, wait.end_us),
            "args": {"for": f"rank {wait.source}", "under_way_us": _ns(wait.flight_us) / 1000},
        }
        found[wait.rank].setdefault("waiting", []).append(event)
    return found


def _place(rank: int, start_us: float, end_us: float) -> Event:
    start, end = _ns(start_us), _ns(end_us)
    return {"pid": rank, "tid": 0, "ts": start / 1000, "dur": (end - start) / 1000}


def _side_by_side(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans dealt to as few tracks as hold them without overlap."""
    tracks: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_us, span.end_us)):
        free = (track for track in tracks if _ns(track[-1].end_us) <= _ns(span.start_us))
        track = next(free, None)
        if track is None:
            tracks.append(track := [])
        track.append(span)
    return tracks or [[]]


def _transfers(spans: tuple[Span, ...], threads: dict[Span, int]) -> Iterator[Event]:
    """Slices of all transfers, each with its end of a flow right behind it."""
    receives = {s.action: s for s in spans if isinstance(s.action, Action) and not _is_send(s)}
    number = 0
    for span in spans:
        if not _is_send(span):
            continue
        assert isinstance(span.action, Action)
        yield _slice(span, threads[span])
        receive = receives.pop(peer_of(span.action), None)
        if receive is None:
            continue
        # Viewers drop arrows that go back in time, as clocks that differ can make them.
        meeting = max(span.start_us, receive.start_us)
        backwards = meeting > receive.end_us
        if not backwards:
            yield _flow("s", number, span, at_us=span.start_us, thread=threads[span])
        yield _slice(receive, threads[receive])
        if not backwards:
            yield _flow("f", number, receive, at_us=meeting, thread=threads[receive])
            number += 1
    for receive in receives.values():
        yield _slice(receive, threads[receive])


def _is_send(span: Span) -> bool:
    return isinstance(span.action, Action) and span.action.kind.is_send


def _slice(span: Span, thread: int) -> Event:
    action = span.action
    if isinstance(action, FusedPair):
        kind, colour = "OVERLAP_F_B", _COLOURS[Kind.B]
        args: Event = {"forward": str(action.forward), "backward": str(action.backward)}
    else:
        kind, colour = action.kind.value, _COLOURS[action.kind]
        args = {"stage": action.stage, "microbatch": action.microbatch}
    return {
        "ph": "X",
        "name": str(action),
        "cat": "compute" if span.is_compute else "transfer",
        **_place(span.rank, *span[2:]),
        "tid": thread,
        "cname": colour,
        "args": {"kind": kind, **args},
    }


def _flow(phase: str, number: int, span: Span, *, at_us: float, thread: int) -> Event:
    assert isinstance(span.action, Action)
    name = "activation" if span.action.kind in (Kind.SEND_F, Kind.RECV_F) else "gradient"
    event = {"ph": phase, "id": number, "name": name, "cat": "transfer"}
    if phase == "f":
        event["bp"] = "e"  # binds to the slice around it, not to the next one
    return {**event, "pid": span.rank, "tid": thread, "ts": _ns(at_us) / 1000}


def _metadata(rank: int, thread: int, what: str, name: str) -> list[Event]:
    place = {"ph": "M", "pid": rank, "tid": thread, "ts": 0}
    order = rank if what == "process" else thread
    return [
        {**place, "name": f"{what}_name", "args": {"name": name}},
        {**place, "name": f"{what}_sort_index", "args": {"sort_index": order}},
    ]


def _ns(time_us: float) -> int:
    return round(time_us * 1000)
