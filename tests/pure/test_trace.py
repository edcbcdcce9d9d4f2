"""Chrome traces keep the rules that viewers rely on."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from npu_pipe import Action, Costs, Kind, Span, Timeline, build_schedule, lower, simulate
from npu_pipe.errors import ConfigError
from npu_pipe.ir.program import peer_of
from npu_pipe.timeline.phase import Phase, PhaseSpan
from npu_pipe.timeline.trace import chrome_trace, write_trace

CASES = [
    ("gpipe", 2, 4, 0.0),
    ("gpipe", 4, 6, 0.3),
    ("1f1b", 4, 8, 0.0),
    ("1f1b", 4, 8, 0.25),
    ("1f1b", 3, 5, 4.0),
    ("interleaved-1f1b", 2, 4, 0.0),
    ("interleaved-1f1b", 4, 8, 0.7),
    ("interleaved-1f1b", 4, 8, 1 / 3),
]


def predicted(name: str, ranks: int, microbatches: int, transfer: float) -> Timeline:
    schedule = build_schedule(name, ranks=ranks, microbatches=microbatches)
    costs = Costs.uniform(schedule.stages, transfer=transfer)
    return simulate(lower(schedule, costs), costs)


def as_measured(timeline: Timeline, seed: int) -> Timeline:
    """Times in microseconds that are no round numbers; receives posted well ahead."""
    rng = random.Random(seed)

    def stretch(span: Span) -> Span:
        ahead = 900.0 * rng.random() if span.action.kind.is_receive else 0.0
        start = max(1234.567 * span.start_us - ahead, 0.0)
        return span._replace(start_us=start, end_us=1234.567 * span.end_us + rng.random())

    transfers = tuple(map(stretch, timeline.transfers))
    compute = tuple(
        span._replace(start_us=1234.567 * span.start_us, end_us=1234.567 * span.end_us)
        for span in timeline.compute
    )
    return Timeline(timeline.schedule, compute, transfers)


def timelines() -> list[Any]:
    cases = [pytest.param(predicted(*case), id="-".join(map(str, case))) for case in CASES]
    cases += [
        pytest.param(as_measured(predicted(*case), seed), id=f"measured-{seed}")
        for seed, case in enumerate(CASES)
    ]
    return cases


def of_phase(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def ns(time_us: float) -> int:
    return round(time_us * 1000)


@pytest.mark.parametrize("timeline", timelines())
def test_every_span_is_one_slice_with_its_times_and_arguments(timeline: Timeline) -> None:
    slices = {
        (e["pid"], e["name"]): e
        for e in of_phase(chrome_trace(timeline), "X")
        if e["cat"] in ("compute", "transfer")
    }
    spans = (*timeline.compute, *timeline.transfers)
    assert len(slices) == len(spans)
    for span in spans:
        event = slices[span.rank, str(span.action)]
        assert ns(event["ts"]) == ns(span.start_us)
        assert ns(event["ts"]) + ns(event["dur"]) == ns(span.end_us)
        assert event["dur"] >= 0
        kind, stage, microbatch = span.action
        assert event["args"] == {"kind": kind.value, "stage": stage, "microbatch": microbatch}
        assert event["cat"] == ("compute" if span.is_compute else "transfer")


@pytest.mark.parametrize("timeline", timelines())
def test_slices_of_one_track_do_not_overlap(timeline: Timeline) -> None:
    tracks = defaultdict(list)
    for event in of_phase(chrome_trace(timeline), "X"):
        tracks[event["pid"], event["tid"]].append(event)
    for events in tracks.values():
        for before, after in pairwise(events):
            assert ns(before["ts"]) + ns(before["dur"]) <= ns(after["ts"])


@pytest.mark.parametrize("timeline", timelines())
def test_events_are_sorted_and_metadata_comes_first(timeline: Timeline) -> None:
    events = chrome_trace(timeline)["traceEvents"]
    times = [event["ts"] for event in events]
    assert times == sorted(times)
    phases = [event["ph"] == "M" for event in events]
    assert phases == sorted(phases, reverse=True)


@pytest.mark.parametrize("timeline", timelines())
def test_every_transfer_has_a_flow_that_binds_to_both_of_its_slices(timeline: Timeline) -> None:
    trace = chrome_trace(timeline)
    latest: dict[tuple[int, int], dict[str, Any]] = {}
    ends: dict[str, dict[int, dict[str, Any]]] = {"s": {}, "f": {}}
    for event in trace["traceEvents"]:
        track = event["pid"], event["tid"]
        if event["ph"] == "X":
            latest[track] = event
        elif event["ph"] in "sf":
            # A viewer binds to the slice that is open on the track when it reads the event.
            slice_ = latest[track]
            assert ns(slice_["ts"]) <= ns(event["ts"]) <= ns(slice_["ts"]) + ns(slice_["dur"])
            assert event["id"] not in ends[event["ph"]]
            ends[event["ph"]][event["id"]] = slice_
            if event["ph"] == "f":
                assert event["bp"] == "e"
                assert event["id"] in ends["s"]
    assert ends["s"].keys() == ends["f"].keys()
    pairs = {(ends["s"][i]["name"], ends["f"][i]["name"]) for i in ends["s"]}
    sends = [span.action for span in timeline.transfers if span.action.kind.is_send]
    assert pairs == {(str(send), str(peer_of(send))) for send in sends}
    assert len(ends["s"]) == len(sends)


def test_ranks_are_processes_and_lanes_are_tracks() -> None:
    trace = chrome_trace(predicted("1f1b", 3, 4, 0.5))
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in of_phase(trace, "M")
        if e["name"] == "thread_name"
    }
    first = ["compute", "waiting", "down: send", "up: receive"]
    assert [names[0, tid] for tid in range(4)] == first
    middle = ["compute", "waiting", "down: receive", "down: send", "up: receive", "up: send"]
    assert [names[1, tid] for tid in range(6)] == middle
    processes = {e["pid"]: e["args"] for e in of_phase(trace, "M") if e["name"] == "process_name"}
    assert processes == {rank: {"name": f"rank {rank}"} for rank in range(3)}
    order = {
        e["pid"]: e["args"]["sort_index"]
        for e in of_phase(trace, "M")
        if e["name"] == "process_sort_index"
    }
    assert order == {0: 0, 1: 1, 2: 2}
    for event in trace["traceEvents"]:
        assert (event["pid"], event["tid"]) in names


def test_waits_and_phases_have_tracks_of_their_own() -> None:
    timeline = replace(
        predicted("1f1b", 2, 2, 2.0),
        phases=(PhaseSpan(1, Phase.LOSS, 3.5, 4.0), PhaseSpan(0, Phase.OPTIMIZER, 21.0, 22.5)),
    )
    trace = chrome_trace(timeline)
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in of_phase(trace, "M")
        if e["name"] == "thread_name"
    }
    assert [names[1, tid] for tid in range(3)] == ["compute", "waiting", "phases"]
    slices = [e for e in of_phase(trace, "X") if e["cat"] in ("phase", "waiting")]
    found = {(e["pid"], names[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"]) for e in slices}
    assert {row for row in found if row[1] == "phases"} == {
        (0, "phases", "optimizer", 21, 1.5),
        (1, "phases", "loss", 3.5, 0.5),
    }
    waits = {row for row in found if row[1] == "waiting"}
    assert (1, "waiting", "1RECV_F0", 0, 3) in waits
    (first,) = [e for e in slices if (e["name"], e["pid"]) == ("1RECV_F0", 1)]
    assert first["args"] == {"for": "rank 0", "under_way_us": 2}


def test_kinds_have_colours_of_their_own() -> None:
    schedule = build_schedule("gpipe", ranks=1, microbatches=1)
    kinds = (Kind.F, Kind.B, Kind.I, Kind.W)
    spans = tuple(Span(0, Action(kind, 0, 0), i, i + 1) for i, kind in enumerate(kinds))
    events = of_phase(chrome_trace(Timeline(schedule, spans)), "X")
    assert len({event["cname"] for event in events}) == 4


def test_transfers_that_overlap_get_tracks_of_their_own() -> None:
    schedule = build_schedule("1f1b", ranks=2, microbatches=2)
    posted = [Span(1, Action(Kind.RECV_F, 1, i), 0.0, 5.0 + i) for i in range(2)]
    trace = chrome_trace(Timeline(schedule, (), tuple(posted)))
    assert len({event["tid"] for event in of_phase(trace, "X")}) == 2
    names = [e["args"]["name"] for e in of_phase(trace, "M") if e["name"] == "thread_name"]
    assert names.count("down: receive") == 2


def test_an_arrow_back_in_time_is_left_out() -> None:
    schedule = build_schedule("1f1b", ranks=2, microbatches=1)
    send = Span(0, Action(Kind.SEND_F, 0, 0), 10.0, 12.0)
    receive = Span(1, Action(Kind.RECV_F, 1, 0), 5.0, 9.0)
    trace = chrome_trace(Timeline(schedule, (), (send, receive)))
    assert len(of_phase(trace, "X")) == 2
    assert not of_phase(trace, "s")
    assert not of_phase(trace, "f")


def test_the_file_holds_the_trace(tmp_path: Path) -> None:
    timeline = predicted("1f1b", 2, 2, 0.5)
    write_trace(timeline, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == chrome_trace(timeline)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_path_that_cannot_be_written_is_refused_and_keeps_what_was_there(tmp_path: Path) -> None:
    timeline = predicted("1f1b", 2, 2, 0.0)
    with pytest.raises(ConfigError, match="it is a folder"):
        write_trace(timeline, tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        write_trace(timeline, tmp_path / "nowhere" / "trace.json")
    assert list(tmp_path.iterdir()) == []
