"""Lowering: what it promises, played by threads whose sends wait for their receive."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from core_helpers.executors import run_strictly, run_with_lanes
from core_helpers.random_cases import prefetch_for, random_costs, random_schedule
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_pipe import Costs, Program, Schedule, build_schedule, check, lower, simulate
from npu_pipe.errors import CostsError, ScheduleError
from npu_pipe.ir.action import flatten
from npu_pipe.ir.program import peer_of, route
from npu_pipe.ir.text import format_orders, parse_orders

seeds = st.integers(0, 2**48)


def many(examples: int):
    return settings(derandomize=True, deadline=None, max_examples=examples)


def random_program(seed: int, prefetch: int) -> Program:
    rng = Random(seed)
    schedule = random_schedule(rng)
    costs = replace(random_costs(rng, schedule), overlapped=rng.random() < 0.8)
    return lower(schedule, costs, prefetch=prefetch_for(schedule, prefetch))


def all_once(schedule: Schedule) -> Counter:
    return Counter(a for order in schedule.orders for step in order for a in flatten(step))


def test_a_program_reads_like_this():
    program = lower(build_schedule("1f1b", ranks=2, microbatches=2))
    assert format_orders(program.orders).splitlines() == [
        "rank 0: 0F0      0SEND_F0 0F1      0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "rank 1: 1RECV_F0 1F0      1RECV_F1 1B0      1SEND_B0 1F1 1B1      1SEND_B1",
    ]


@given(seeds, st.integers(1, 4))
@many(60)
def test_strict_threads_run_it_to_the_end(seed, prefetch):
    program = random_program(seed, prefetch)
    assert run_strictly(program) == all_once(program.schedule)


@given(seeds, st.integers(1, 4))
@many(40)
def test_threads_with_lanes_run_it_to_the_end(seed, prefetch):
    program = random_program(seed, prefetch)
    assert run_with_lanes(program) == all_once(program.schedule)


@given(seeds, st.integers(1, 4))
@many(150)
def test_compute_keeps_its_order_and_transfers_meet_in_one(seed, prefetch):
    program = random_program(seed, prefetch)
    lanes: dict[object, dict[bool, list[str]]] = {}
    for rank, order in enumerate(program.orders):
        compute = tuple(step for step in order if flatten(step)[0].kind.is_compute)
        assert compute == program.schedule.orders[rank]
        for step in (step for step in order if step not in compute):
            way = route(program.schedule, step)
            assert way.source != way.target
            assert rank == (way.source if step.kind.is_send else way.target)
            name = str(step if step.kind.is_send else peer_of(step))
            lanes.setdefault(way, {True: [], False: []})[step.kind.is_send].append(name)
    assert all(ends[True] == ends[False] for ends in lanes.values())


@given(seeds, st.integers(1, 4))
@many(150)
def test_a_rank_never_holds_more_than_prefetch_inputs_of_a_lane(seed, prefetch):
    program = random_program(seed, prefetch)
    for order in program.orders:
        held: Counter[str] = Counter()
        lane_of = {}
        for step in order:
            for action in flatten(step):
                if action.kind.is_receive:
                    lane = route(program.schedule, action).lane
                    lane_of[action.kind.value[-1], action.stage, action.microbatch] = lane
                    held[lane] += 1
                    assert held[lane] <= program.prefetch
                elif action.kind.is_compute:
                    carries = {"F": "F", "B": "B", "I": "B"}.get(action.kind.value)
                    held[lane_of.get((carries, action.stage, action.microbatch))] -= 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (3, 2)])
def test_the_schedules_run_on_both_executors(name, p, m):
    schedule = build_schedule(name, ranks=p, microbatches=m)
    for transfer in (0, 0.25, 5):
        program = lower(schedule, Costs.uniform(schedule.stages, transfer=transfer))
        assert run_strictly(program) == run_with_lanes(program) == all_once(schedule)


def test_transfers_that_occupy_their_ranks_wait_until_both_are_free():
    schedule = build_schedule("1f1b", ranks=2, microbatches=3)
    costs = Costs([2, 3], [1, 1], [1, 1], [1], overlapped=False)
    program = lower(schedule, costs)
    assert format_orders(program.orders).splitlines() == [
        "rank 0: 0F0      0SEND_F0 0F1      0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 "
        "0RECV_B2 0B2",
        "rank 1: 1RECV_F0 1F0      1RECV_F1 1B0      1SEND_B0 1F1 1B1 1RECV_F2 1SEND_B1 1F2 "
        "1B2      1SEND_B2",
    ]


@pytest.mark.parametrize(
    ("name", "transfer", "gain"),
    [
        *(("gpipe", 1, 0.05), ("1f1b", 1, 0.15), ("interleaved-1f1b", 0.1, 0.15)),
        *(("interleaved-1f1b", 1, 0.2), ("zb-h1", 0.5, 0.1), ("zb-v", 1, 0.14)),
        *(("v-min", 0.5, -0.01), ("dualpipe", 0.1, 0.0), ("chimera", 1, 0.0)),
    ],
)
def test_they_take_less_than_placed_as_if_they_were_free(name, transfer, gain):
    schedule = build_schedule(name, ranks=4, microbatches=8)
    free = Costs.uniform(schedule.stages, transfer=transfer)
    costs = replace(free, overlapped=False)
    makespan, other = (simulate(lower(schedule, each), costs).makespan for each in (costs, free))
    assert makespan <= other * (1 - gain)
    assert simulate(schedule, costs).makespan == makespan


def test_any_prefetch_depth_will_do():
    schedule = build_schedule("interleaved-1f1b", ranks=4, microbatches=8)
    for prefetch in (1, 3, 1000, 10**30):
        assert lower(schedule, prefetch=prefetch).prefetch == prefetch


def test_a_pair_that_takes_two_inputs_of_a_lane_needs_prefetch_two():
    text = "rank 0: 0F0 0F1 1F2 1B2 0B0 0B1\nrank 1: 0F2 1F0 (1F1;0B2)OVERLAP_F_B 1B0 1B1"
    schedule = Schedule("both ways", 3, (0, 1), parse_orders(text), mirrored=(2,))
    check(lower(schedule, prefetch=2))
    with pytest.raises(ScheduleError, match="takes two of one lane, and prefetch is 1") as error:
        lower(schedule, prefetch=1)
    assert (error.value.rank, error.value.position) == (1, 2)


def test_one_rank_has_nothing_to_send():
    schedule = build_schedule("interleaved-1f1b", ranks=1, microbatches=3, chunks=2)
    assert lower(schedule).orders == schedule.orders


def test_what_cannot_be_lowered_is_refused():
    good = build_schedule("1f1b", ranks=2, microbatches=2)
    with pytest.raises(ScheduleError, match="0F2 is missing"):
        lower(replace(good, microbatches=3))
    with pytest.raises(ScheduleError, match="only a Schedule"):
        lower(None)
    with pytest.raises(CostsError, match="the costs have 3"):
        lower(good, Costs.uniform(3))


def test_lowering_is_a_pure_function():
    schedule = build_schedule("interleaved-1f1b", ranks=4, microbatches=8)
    before = repr(schedule)
    assert lower(schedule) == lower(schedule)
    assert repr(schedule) == before
