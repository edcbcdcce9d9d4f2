"""The simulator against the seeds' numbers, definitions, and other methods."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from core_helpers.random_cases import prefetch_for, random_costs, random_schedule
from core_helpers.reference import ends_by_longest_path, peak_by_events, starts_of_program
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_pipe import Action, Costs, Kind, Program, Schedule, build_schedule, lower, simulate
from npu_pipe.errors import ScheduleError
from npu_pipe.ir.placement import linear
from npu_pipe.ir.program import peer_of
from npu_pipe.ir.text import parse_orders

seeds = st.integers(0, 2**48)


def many(examples: int):
    return settings(derandomize=True, deadline=None, max_examples=examples)


@pytest.mark.parametrize(
    ("p", "m", "percent"), [(4, 8, 27.3), (4, 16, 15.8), (8, 16, 30.4), (8, 32, 17.9)]
)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_second_seeds_bubble_table(name, p, m, percent):
    timeline = simulate(build_schedule(name, ranks=p, microbatches=m), Costs.uniform(p))
    assert round(100 * timeline.bubble_ratio, 1) == percent


@given(seeds)
@many(3000)
def test_ends_are_the_longest_paths(seed):
    rng = Random(seed)
    schedule = random_schedule(rng)
    costs = random_costs(rng, schedule)
    spans = iter(simulate(schedule, costs).compute)
    for rank, ends in enumerate(ends_by_longest_path(schedule, costs)):
        for step, end in zip(schedule.orders[rank], ends, strict=True):
            span = next(spans)
            assert (span.rank, span.action, span.end_us) == (rank, step, end)
    assert next(spans, None) is None


@given(seeds, st.integers(1, 4))
@many(150)
def test_starts_in_a_program_are_the_least_that_its_rules_allow(seed, prefetch):
    rng = Random(seed)
    schedule = random_schedule(rng)
    costs, other_costs = random_costs(rng, schedule), random_costs(rng, schedule)
    program = lower(schedule, other_costs, prefetch=prefetch_for(schedule, prefetch))
    timeline = simulate(program, costs)
    found = {(s.rank, s.action): s.start_us for s in (*timeline.compute, *timeline.transfers)}
    assert found == starts_of_program(program, costs)


@given(seeds)
@many(100)
def test_definitions_of_makespan_span_bubble_and_peak(seed):
    rng = Random(seed)
    schedule = random_schedule(rng)
    timeline = simulate(schedule, random_costs(rng, schedule))
    spans = timeline.compute
    assert timeline.makespan == max(span.end_us for span in spans)
    by_rank = [[s for s in spans if s.rank == rank] for rank in range(schedule.ranks)]
    assert timeline.span == max(
        max(s.end_us for s in own) - min(s.start_us for s in own) for own in by_rank
    )
    busy = sum(s.end_us - s.start_us for s in spans)
    if timeline.makespan:
        expected = 1 - busy / (schedule.ranks * timeline.makespan)
        assert timeline.bubble_ratio == pytest.approx(expected)
    else:
        assert timeline.bubble_ratio == 0
    assert timeline.peak_activations == tuple(
        peak_by_events(schedule, rank) for rank in range(schedule.ranks)
    )


@given(seeds, st.integers(1, 4))
@many(100)
def test_a_program_never_beats_its_schedule(seed, prefetch):
    rng = Random(seed)
    schedule = random_schedule(rng)
    costs = random_costs(rng, schedule)
    program = lower(
        schedule, random_costs(rng, schedule), prefetch=prefetch_for(schedule, prefetch)
    )
    ideal, real = simulate(schedule, costs), simulate(program, costs)
    for one, other in zip(ideal.compute, real.compute, strict=True):
        assert one[:2] == other[:2]
        assert one.start_us <= other.start_us


@given(seeds, st.integers(1, 4))
@many(100)
def test_a_program_equals_its_schedule_when_transfers_take_no_time(seed, prefetch):
    rng = Random(seed)
    schedule = random_schedule(rng)
    costs = random_costs(rng, schedule, transfers=False)
    program = lower(schedule, costs, prefetch=prefetch_for(schedule, prefetch))
    assert simulate(program, costs).compute == simulate(schedule, costs).compute


@given(seeds, st.integers(1, 4), st.booleans())
@many(100)
def test_transfers_meet_and_keep_their_times(seed, prefetch, overlapped):
    rng = Random(seed)
    schedule = random_schedule(rng)
    costs = random_costs(rng, schedule)
    costs = replace(costs, overlapped=overlapped)
    program = lower(schedule, costs, prefetch=prefetch_for(schedule, prefetch))
    timeline = simulate(program, costs)
    ends = {span.action: span for span in timeline.transfers}
    made = {a: span for span in timeline.compute for a in _halves(span)}
    assert len(ends) == sum(len(order) for order in program.orders) - len(timeline.compute)
    for action, span in ends.items():
        if not action.kind.is_send:
            continue
        other = ends[peer_of(action)]
        assert (span.start_us, span.end_us) == (other.start_us, other.end_us)
        assert span.rank != other.rank
        producer = next(made[a] for a in _producers(action) if a in made)
        assert producer.end_us <= span.start_us
        user = next(made[a] for a in _users(action) if a in made)
        assert span.end_us <= user.start_us
        scale = costs.microbatch_scale[action.microbatch] if costs.microbatch_scale else 1.0
        boundary = min(action.stage, peer_of(action).stage)
        assert span.end_us - span.start_us == costs.transfer[boundary] * scale


@given(seeds)
@many(100)
def test_with_costs_that_occupy_ranks_each_rank_does_one_thing_at_a_time(seed):
    rng = Random(seed)
    schedule = random_schedule(rng)
    costs = random_costs(rng, schedule)
    costs = replace(costs, overlapped=False)
    program = lower(schedule, costs)
    timeline = simulate(program, costs)
    spans = {(s.rank, s.action): s for s in (*timeline.compute, *timeline.transfers)}
    for rank, order in enumerate(program.orders):
        clock = 0.0
        for step in order:
            assert spans[rank, step].start_us >= clock
            clock = spans[rank, step].end_us
    assert simulate(schedule, costs) == simulate(lower(schedule, costs), costs)


def test_a_late_receive_is_posted_when_the_inputs_use_begins():
    # Rank 1 computes 1F0 for a long time; with prefetch 1 the second activation waits for 1F0 to
    # begin, the third for 1F1 to begin.
    text = "rank 0: 0F0 0F1 0F2\nrank 1: 1F0 1F1 1F2"
    schedule = Schedule("forward", 3, linear(2), parse_orders(text), training=False)
    costs = Costs([1, 10], [0, 0], [0, 0], [2])
    for prefetch, starts in ((1, [1, 3, 13]), (2, [1, 3, 5])):
        timeline = simulate(lower(schedule, costs, prefetch=prefetch), costs)
        sends = [span.start_us for span in timeline.transfers if span.action.kind.is_send]
        assert sends == starts
        assert [span.start_us for span in timeline.compute if span.rank == 1] == [3, 13, 23]


def test_transfers_of_one_lane_take_turns():
    text = "rank 0: 0F0 0F1 0F2\nrank 1: 1F0 1F1 1F2"
    schedule = Schedule("forward", 3, linear(2), parse_orders(text), training=False)
    costs = Costs([1, 1], [0, 0], [0, 0], [10])
    timeline = simulate(lower(schedule, costs, prefetch=4), costs)
    sends = [span.start_us for span in timeline.transfers if span.action.kind.is_send]
    assert sends == [1, 11, 21]
    assert timeline.makespan == 32
    assert simulate(schedule, costs).makespan == 14  # each with a way of its own


def test_neighbouring_stages_on_one_rank_hand_over_at_once():
    orders = parse_orders("rank 0: 0F0 1F0 1B0 0B0")
    schedule = Schedule("one rank", 1, (0, 0), orders)
    costs = Costs.uniform(2, transfer=100)
    assert simulate(schedule, costs).makespan == 6
    assert simulate(lower(schedule), costs).makespan == 6
    assert simulate(lower(schedule), costs).transfers == ()


def test_a_fused_pair_takes_the_time_of_both_halves_and_delays_both_outputs():
    text = "rank 0: 0F0 (0F1;0B0)OVERLAP_F_B 0B1\nrank 1: 1F0 1B0 1F1 1B1"
    schedule = Schedule("fused", 2, (0, 1), parse_orders(text))
    spans = {str(span.action): span for span in simulate(schedule, Costs.uniform(2)).compute}
    pair = spans["(0F1;0B0)OVERLAP_F_B"]
    assert (pair.start_us, pair.end_us) == (4, 7)
    assert spans["1F1"].start_us == 7


def test_costs_of_zero_give_a_timeline_of_zero():
    costs = Costs.uniform(4, forward=0, input_grad=0, weight_grad=0)
    timeline = simulate(build_schedule("1f1b", ranks=4, microbatches=4), costs)
    assert (timeline.makespan, timeline.span, timeline.bubble_ratio) == (0, 0, 0)


def test_wrong_subjects_are_refused():
    costs = Costs.uniform(2)
    with pytest.raises(ScheduleError, match="only a Schedule or a Program"):
        simulate(None, costs)
    with pytest.raises(ScheduleError, match="0F0 is missing"):
        simulate(Schedule("empty", 1, (0, 1), ((), ())), costs)
    good = build_schedule("1f1b", ranks=2, microbatches=1)
    with pytest.raises(ScheduleError, match="computes nothing"):
        simulate(Program(good, ((), ())), costs)


def _halves(span):
    return span.action if isinstance(span.action[0], tuple) else (span.action,)


def _producers(send):
    kinds = (Kind.F,) if send.kind is Kind.SEND_F else (Kind.I, Kind.B)
    return [Action(kind, send.stage, send.microbatch) for kind in kinds]


def _users(send):
    return [a._replace(stage=peer_of(send).stage) for a in _producers(send)]
