"""The laws of docs/laws.md that the core answers for, held on every schedule of the registry."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from core_helpers.executors import run_strictly, run_with_lanes
from core_helpers.random_cases import gives, wants

from npu_pipe import Costs, Kind, Schedule, build_schedule, check, lower, simulate
from npu_pipe.errors import ScheduleError
from npu_pipe.ir.action import flatten
from npu_pipe.ir.files import schedule_from_json, schedule_hash, to_json
from npu_pipe.ir.program import peer_of, route
from npu_pipe.ir.text import format_orders, parse_orders
from npu_pipe.schedules.registry import FAMILIES

# A family is tested on those of these sizes that its rule covers.
SIZES = [(1, 1), (1, 4), (2, 1), (2, 4), (3, 2), (3, 6), (4, 4), (4, 8), (5, 15), (8, 16)]
ALL: list[tuple[str, int, int, int]] = []
for _name, _family in FAMILIES.items():
    for _ranks, _microbatches in SIZES:
        for _chunks in (1, 2, 3) if _family.any_chunks else (_family.chunks,):
            with suppress(ScheduleError):
                build_schedule(_name, ranks=_ranks, microbatches=_microbatches, chunks=_chunks)
                ALL.append((_name, _ranks, _microbatches, _chunks))

TRANSFERS = (0, 0.3, 4)


def test_the_sizes_leave_every_family_some():
    assert {case[0] for case in ALL} == set(FAMILIES)


def every(cases: list[tuple[str, int, int, int]]):
    return pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), cases)


def build(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    return build_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)


@every(ALL)
def test_law_1_everything_once(name, ranks, microbatches, chunks):
    schedule = build(name, ranks, microbatches, chunks)
    facts = Counter(
        fact
        for order in schedule.orders
        for step in order
        for action in flatten(step)
        for fact in gives(action)
    )
    assert facts == Counter(
        (what, stage, i)
        for what in ("activation", "input gradient", "weight gradient")
        for stage in range(schedule.stages)
        for i in range(microbatches)
    )


@every(ALL)
def test_law_2_needs_hold_in_every_order(name, ranks, microbatches, chunks):
    schedule = build(name, ranks, microbatches, chunks)
    check(schedule)
    timeline = simulate(schedule, Costs.uniform(schedule.stages))
    done = {}
    for span in timeline.compute:
        for action in flatten(span.action):
            done |= dict.fromkeys(gives(action), span.end_us)
    for span in timeline.compute:
        for action in flatten(span.action):
            assert all(done[f] <= span.start_us for f in wants(action, schedule.stages))


@every([case for case in ALL if case[1] <= 4])
def test_law_3_no_hang_with_sends_that_wait_for_their_receive(name, ranks, microbatches, chunks):
    schedule = build(name, ranks, microbatches, chunks)
    everything = Counter(a for order in schedule.orders for step in order for a in flatten(step))
    program = lower(schedule, Costs.uniform(schedule.stages, transfer=0.3))
    assert run_strictly(program) == run_with_lanes(program) == everything


@every(ALL)
def test_law_4_one_order_per_lane_and_pair(name, ranks, microbatches, chunks):
    schedule = build(name, ranks, microbatches, chunks)
    for transfer in TRANSFERS:
        program = lower(schedule, Costs.uniform(schedule.stages, transfer=transfer))
        sent: dict[object, list[str]] = {}
        received: dict[object, list[str]] = {}
        for step in (step for order in program.orders for step in order):
            action = flatten(step)[0]
            if action.kind.is_send:
                sent.setdefault(route(schedule, action), []).append(str(action))
            elif action.kind.is_receive:
                received.setdefault(route(schedule, action), []).append(str(peer_of(action)))
        assert sent == received


@every(ALL)
def test_law_5_peak_activations_are_those_of_the_order(name, ranks, microbatches, chunks):
    schedule = build(name, ranks, microbatches, chunks)
    timeline = simulate(schedule, Costs.uniform(schedule.stages))
    for rank, order in enumerate(schedule.orders):
        held = peak = 0
        for action in (action for step in order for action in flatten(step)):
            held += (action.kind is Kind.F) - (action.kind in (Kind.B, Kind.W))
            peak = max(peak, held)
        assert held == 0
        assert timeline.peak_activations[rank] == peak <= microbatches * chunks


@every(ALL)
def test_law_7_text_and_files_come_back(name, ranks, microbatches, chunks):
    schedule = build(name, ranks, microbatches, chunks)
    assert parse_orders(format_orders(schedule.orders)) == schedule.orders
    assert schedule_from_json(to_json(schedule)) == schedule
    program = lower(schedule)
    assert parse_orders(format_orders(program.orders)) == program.orders


@every(ALL)
def test_law_9_lowering_keeps_the_order_of_compute(name, ranks, microbatches, chunks):
    schedule = build(name, ranks, microbatches, chunks)
    for transfer in TRANSFERS:
        for prefetch in (2, 4):
            costs = Costs.uniform(schedule.stages, transfer=transfer)
            program = lower(schedule, costs, prefetch=prefetch)
            assert schedule.orders == tuple(
                tuple(step for step in order if flatten(step)[0].kind.is_compute)
                for order in program.orders
            )


@every(ALL)
def test_law_11_the_same_inputs_give_the_same_schedule(name, ranks, microbatches, chunks):
    one, two = (build(name, ranks, microbatches, chunks) for _ in range(2))
    assert schedule_hash(one) == schedule_hash(two)
    assert lower(one) == lower(two)


@pytest.mark.parametrize("name", FAMILIES)
def test_law_12_a_wrong_schedule_is_refused_before_anything_is_lowered(name):
    schedule = build_schedule(name, ranks=2, microbatches=4)
    orders = (schedule.orders[0], schedule.orders[1][:-1])
    wrong = replace(schedule, orders=orders)
    with pytest.raises(ScheduleError, match="is missing on rank 1"):
        lower(wrong)


def test_the_tests_that_the_laws_name_are_there():
    root = Path(__file__).parents[2]
    text = (root / "docs/laws.md").read_text(encoding="utf-8")
    named = [word.strip("`") for word in text.split() if word.startswith("`tests/")]
    assert len(named) >= 12
    for name in named:
        path, _, test = name.partition("::")
        source = (root / path).read_text(encoding="utf-8")
        assert f"def {test}(" in source, f"docs/laws.md names {name}"
