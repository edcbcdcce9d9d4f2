"""Where the time of a window went: laws on random schedules, and cases by hand."""

from __future__ import annotations

from random import Random

import pytest
from core_helpers.random_cases import prefetch_for, random_costs, random_schedule
from hypothesis import example, given, settings
from hypothesis import strategies as st

from npu_pipe import Action, Costs, Kind, Program, Span, Timeline, build_schedule, lower, simulate
from npu_pipe.errors import ScheduleError
from npu_pipe.ir.action import Step, flatten, parse_step
from npu_pipe.timeline.compare import Parts, compare
from npu_pipe.timeline.critical import PieceKind, critical_path, legs, parts_of
from npu_pipe.timeline.flight import flights
from npu_pipe.timeline.phase import Phase, PhaseSpan
from npu_pipe.timeline.usage import usage
from npu_pipe.timeline.waiting import waits_of

seeds = st.integers(0, 2**48)
many = settings(derandomize=True, deadline=None, max_examples=150)


def random_run(seed: int) -> tuple[Program, Timeline]:
    rng = Random(seed)
    schedule = random_schedule(rng)
    costs = random_costs(rng, schedule)
    program = lower(schedule, costs, prefetch=prefetch_for(schedule, 1 + seed % 3))
    return program, simulate(program, costs)


def jittered(timeline: Timeline, seed: int) -> Timeline:
    """As if measured: times that fit no costs, waits of their own, ends seen late."""
    rng = Random(seed)
    stretch = 10.0 + rng.random()

    def measured(span: Span) -> Span:
        late = rng.random() if not span.is_compute else 0.0
        return span._replace(
            start_us=span.start_us * stretch - late, end_us=span.end_us * stretch + late
        )

    waits = tuple(
        Span(w.rank, w.receive, w.start_us * stretch, w.end_us * stretch)
        for w in waits_of(timeline)
    )
    compute, transfers = (
        tuple(map(measured, spans)) for spans in (timeline.compute, timeline.transfers)
    )
    return Timeline(timeline.schedule, compute, transfers, waits)


def taken_by(step: Step) -> list[Action]:
    brings = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}
    return [a._replace(kind=brings[a.kind]) for a in flatten(step) if a.kind in brings]


@given(seeds)
@many
def test_busy_waiting_and_idle_are_the_makespan(seed: int) -> None:
    _, timeline = random_run(seed)
    for use in usage(timeline):
        whole = use.busy_us + use.waiting_us + use.idle_us
        assert whole == pytest.approx(timeline.makespan)
        assert use.idle_us > -1e-9
        assert use.waiting_us == pytest.approx(sum(w.waiting_us for w in use.waited_for))


@given(seeds)
@example(15258698)  # a pair has both inputs from one other pair: it waits for the later one
@many
def test_hidden_and_exposed_transfers_are_all_transfers(seed: int) -> None:
    """Exposed counted another way: what of a receive lies between two steps, the second of which
    takes it."""
    _, timeline = random_run(seed)
    receives = {s.action: s for s in timeline.transfers if s.action.kind.is_receive}
    for use in usage(timeline):
        mine = [s.end_us - s.start_us for s in receives.values() if s.rank == use.rank]
        assert use.hidden_us + use.exposed_us == pytest.approx(sum(mine))
        exposed, free_us = 0.0, 0.0
        for span in (span for span in timeline.compute if span.rank == use.rank):
            inputs = [receives[r] for r in taken_by(span.action) if r in receives]
            if inputs:
                last = max(inputs, key=lambda receive: receive.end_us)
                exposed += max(last.end_us - max(last.start_us, free_us), 0.0)
            free_us = span.end_us
        assert use.exposed_us == pytest.approx(exposed)


@given(seeds)
@many
def test_the_critical_path_is_as_long_as_the_makespan(seed: int) -> None:
    program, timeline = random_run(seed)
    path = critical_path(timeline, program)
    at = 0.0
    for piece in path:
        assert piece.start_us == pytest.approx(at)
        assert piece.end_us > piece.start_us
        at = piece.end_us
    assert at == pytest.approx(timeline.makespan)
    assert parts_of(path).total_us == pytest.approx(timeline.makespan)


@given(seeds)
@many
def test_nothing_but_compute_and_transfers_is_on_the_path_of_a_prediction(seed: int) -> None:
    """A simulated action begins when the last thing that it waits for has ended."""
    program, timeline = random_run(seed)
    path = critical_path(timeline, program)
    assert not [piece for piece in path if piece.kind is PieceKind.WAITING]


@given(seeds)
@many
def test_a_measured_path_is_as_long_as_the_makespan_too(seed: int) -> None:
    program, timeline = random_run(seed)
    measured = jittered(timeline, seed)
    path = critical_path(measured, program)
    assert parts_of(path).total_us == pytest.approx(measured.makespan)
    assert sum(leg.parts.total_us for leg in legs(path)) == pytest.approx(measured.makespan)


@given(seeds)
@many
def test_a_timeline_does_not_differ_from_itself(seed: int) -> None:
    _, timeline = random_run(seed)
    comparison = compare(timeline, timeline)
    assert comparison.makespan_us == 0
    assert all(d.own == Parts() and d.end_us == 0 for d in comparison.differences)


@given(seeds)
@many
def test_the_parts_of_a_rank_add_up_to_how_much_later_it_ended(seed: int) -> None:
    _, predicted = random_run(seed)
    measured = jittered(predicted, seed)
    comparison = compare(measured, predicted)
    for rank, parts in enumerate(comparison.ranks):
        ends = [
            max((s.end_us for s in t.compute if s.rank == rank), default=0.0)
            for t in (measured, predicted)
        ]
        assert parts.total_us == pytest.approx(ends[0] - ends[1], abs=1e-6)


def spans(*texts: str) -> tuple[Span, ...]:
    """ "rank name start end" """
    found = []
    for text in texts:
        rank, name, start, end = text.split()
        found.append(Span(int(rank), parse_step(name), float(start), float(end)))
    return tuple(found)


# rank 0  |  0F0  |>                       |  0B0  |
# rank 1            <  | 1F0  |   1B0   |>              0 waits for 1, and the transfer takes 10
HAND = Timeline(
    build_schedule("1f1b", ranks=2, microbatches=1),
    spans("0 0F0 0 1000", "0 0B0 4200 6200", "1 1F0 1500 2500", "1 1B0 2500 4000"),
    spans(
        "0 0SEND_F0 1000 4200",
        "0 0RECV_B0 1000 4200",
        "1 1RECV_F0 0 1500",
        "1 1SEND_B0 4000 4250",
    ),
    waits=spans("0 0RECV_B0 1010 4200", "1 1RECV_F0 0 1500"),
    phases=(
        PhaseSpan(1, Phase.LOSS, 2400.0, 2500.0),
        PhaseSpan(0, Phase.OPTIMIZER, 6300.0, 6500.0),
    ),
)


def test_a_measured_window_by_hand() -> None:
    zero, one = usage(HAND)
    assert (zero.busy_us, zero.waiting_us, zero.idle_us) == (3000, 3190, 10)
    assert (zero.exposed_us, zero.hidden_us) == (200, 0), "under way from 4000 to 4200"
    (waited,) = zero.waited_for
    assert (waited.source, str(waited.longest), waited.longest_us) == (1, "0RECV_B0", 3190)
    assert (one.busy_us, one.waiting_us, one.idle_us) == (2500, 1500, 2200)
    assert (one.exposed_us, one.hidden_us) == (500, 0)
    assert (zero.phases, one.phases) == (((Phase.OPTIMIZER, 200.0),), ((Phase.LOSS, 100.0),))
    assert (HAND.makespan, HAND.step_us) == (6200, 6500)


def test_its_critical_path() -> None:
    program = lower(HAND.schedule)
    path = critical_path(HAND, program)
    assert [(p.kind.value, p.name, p.start_us, p.end_us) for p in path] == [
        ("compute", "0F0", 0, 1000),
        ("transfer", "1RECV_F0", 1000, 1500),
        ("compute", "1F0", 1500, 2500),
        ("compute", "1B0", 2500, 4000),
        ("transfer", "0RECV_B0", 4000, 4200),
        ("compute", "0B0", 4200, 6200),
    ]
    assert parts_of(path) == Parts(5500, 700, 0)
    assert [(leg.rank, leg.target, leg.first, leg.last, leg.steps) for leg in legs(path)] == [
        (0, 0, "0F0", "0F0", 1),
        (0, 1, "1RECV_F0", "1RECV_F0", 1),
        (1, 1, "1F0", "1B0", 2),
        (1, 0, "0RECV_B0", "0RECV_B0", 1),
        (0, 0, "0B0", "0B0", 1),
    ]


def test_its_differences_from_a_prediction() -> None:
    costs = Costs(forward=[900, 1000], input_grad=[2000, 1500], weight_grad=[0, 0], transfer=[200])
    comparison = compare(HAND, simulate(lower(HAND.schedule), costs))
    assert comparison.makespan_us == 6200 - 5800
    assert {str(d.action): (d.own, d.end_us) for d in comparison.differences} == {
        "0F0": ((100, 0, 0), 100),
        "0B0": ((0, 0, 300), 400),
        "1F0": ((0, 300, 100), 400),
        "1B0": ((0, 0, 0), 400),
    }
    assert comparison.ranks == (Parts(100, 0, 300), Parts(0, 300, 100))
    assert str(comparison.largest[0].action) == "1F0"


def test_a_transfer_that_nobody_waited_for_takes_the_shortest_time_of_its_boundary() -> None:
    schedule = build_schedule("gpipe", ranks=2, microbatches=2)
    timeline = Timeline(
        schedule,
        spans("0 0F0 0 100", "0 0F1 100 200", "1 1F0 400 900", "1 1F1 901 1400"),
        spans(
            *("0 0SEND_F0 100 5000", "1 1RECV_F0 0 400"),
            *("0 0SEND_F1 200 5000", "1 1RECV_F1 0 901"),
        ),
        waits=spans("1 1RECV_F0 0 400", "1 1RECV_F1 900 901"),
    )
    found = flights(timeline)
    assert found[Action(Kind.RECV_F, 1, 0)].took_us == 300
    assert found[Action(Kind.RECV_F, 1, 1)].took_us == 300, "and not 701"
    one = usage(timeline)[1]
    assert (one.hidden_us, one.exposed_us) == (300, 300)


def test_timelines_of_different_schedules_are_not_compared() -> None:
    with pytest.raises(ScheduleError, match=r"only the measured one has 0F0 on rank 0"):
        compare(HAND, Timeline(HAND.schedule, HAND.compute[1:]))
