"""The schedules: tables to be read with the eyes, closed forms, and sizes that are refused."""

from __future__ import annotations

import itertools
import re
import sys

import pytest
from core_helpers.reference import interleaved_by_rule

from npu_pipe import Action, Costs, FusedPair, Kind, Schedule, build_schedule, check, simulate
from npu_pipe.errors import ScheduleError
from npu_pipe.ir.action import flatten
from npu_pipe.schedules.gpipe import BackwardOrder
from npu_pipe.schedules.registry import FAMILIES, Family

RANKS, MICROBATCHES, CHUNKS = range(1, 9), range(1, 34), range(1, 5)


def table(schedule: Schedule) -> list[str]:
    """What each rank does in each slot when F and B take one unit each."""
    costs = Costs.uniform(schedule.stages, forward=1, input_grad=1, weight_grad=0)
    timeline = simulate(schedule, costs)
    rows = [[".."] * int(timeline.makespan) for _ in range(schedule.ranks)]
    for span in timeline.compute:
        rows[span.rank][int(span.start_us)] = f"{span.action.kind}{span.action.microbatch}"
    return [" ".join(row) for row in rows]


def build(name: str, p: int, m: int, v: int | None = None, **options: object) -> Schedule:
    return build_schedule(name, ranks=p, microbatches=m, chunks=v, **options)


def test_the_first_seeds_table_of_gpipe():
    # Its microbatches A B C D are 0 1 2 3 here.
    assert table(build("gpipe", 2, 4)) == [
        "F0 F1 F2 F3 .. .. B3 B2 B1 B0",
        ".. F0 F1 F2 F3 B3 B2 B1 B0 ..",
    ]


def test_the_first_seeds_table_of_1f1b():
    assert table(build("1f1b", 2, 4)) == [
        "F0 F1 .. B0 F2 B1 F3 B2 .. B3",
        ".. F0 B0 F1 B1 F2 B2 F3 B3 ..",
    ]


def test_the_third_seeds_table_of_three_stages_and_four_microbatches():
    assert table(build("gpipe", 3, 4)) == [
        "F0 F1 F2 F3 .. .. .. .. B3 B2 B1 B0",
        ".. F0 F1 F2 F3 .. .. B3 B2 B1 B0 ..",
        ".. .. F0 F1 F2 F3 B3 B2 B1 B0 .. ..",
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_picture_in_each_docstring_is_what_runs(name):
    doc = sys.modules[FAMILIES[name].build.__module__].__doc__
    shown = re.findall(r"rank \d +((?:(?:F\d|B\d|\.\.) ?)+)", doc)
    assert [row.strip() for row in shown] == table(build(name, 3, 4))


def test_the_columns_in_the_interleaved_docstring_are_what_runs():
    forwards = [a for a in build("interleaved-1f1b", 4, 8, 2).orders[0] if a.kind is Kind.F]
    assert "".join(str(a.stage // 4) for a in forwards) == "0000111100001111"
    assert "".join(str(a.microbatch) for a in forwards) == "0123012345674567"


def test_gpipe_has_two_orders_of_backwards():
    fifo = build("gpipe", 2, 4, backward_order=BackwardOrder.FIFO)
    assert table(fifo) == [
        "F0 F1 F2 F3 .. .. B0 B1 B2 B3",
        ".. F0 F1 F2 F3 B0 B1 B2 B3 ..",
    ]
    assert build("gpipe", 2, 4, backward_order="fifo") == fifo
    assert build("gpipe", 2, 4, backward_order="reverse") == build("gpipe", 2, 4)


@pytest.mark.parametrize("order", ["revers", "FIFO", "", None, 0, []])
def test_gpipe_takes_no_third_order(order):
    with pytest.raises(ScheduleError, match="one of reverse, fifo"):
        build("gpipe", 2, 4, backward_order=order)


@pytest.mark.parametrize("order", BackwardOrder)
@pytest.mark.parametrize("p", RANKS)
def test_closed_forms_of_gpipe(p, order):
    for m in MICROBATCHES:
        schedule = build("gpipe", p, m, backward_order=order)
        check(schedule)
        timeline = simulate(schedule, Costs.uniform(p))
        assert timeline.makespan == timeline.span == 3 * (m + p - 1)
        assert timeline.peak_activations == (m,) * p
        assert timeline.bubble_ratio == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("p", RANKS)
def test_closed_forms_of_1f1b(p):
    for m in MICROBATCHES:
        schedule = build("1f1b", p, m)
        check(schedule)
        timeline = simulate(schedule, Costs.uniform(p))
        assert timeline.makespan == timeline.span == 3 * (m + p - 1)
        assert timeline.peak_activations == tuple(min(p - r, m) for r in range(p))


@pytest.mark.parametrize("p", RANKS)
def test_1f1b_is_its_rule_word_by_word(p):
    for m, rank in itertools.product(MICROBATCHES, range(p)):
        order = build("1f1b", p, m).orders[rank]
        w = min(p - rank - 1, m)
        words = [f"F{i}" for i in range(w)]
        for i in range(m - w):
            words += [f"F{w + i}", f"B{i}"]
        words += [f"B{i}" for i in range(m - w, m)]
        assert [f"{a.kind}{a.microbatch}" for a in order] == words
        assert {a.stage for a in order} == {rank}


@pytest.mark.parametrize("v", CHUNKS)
@pytest.mark.parametrize("p", RANKS)
def test_interleaved_is_its_rule_action_by_action_or_refused(p, v):
    for m in MICROBATCHES:
        rounds = max(1, m // p)
        if m % rounds:
            with pytest.raises(ScheduleError, match="floor"):
                build("interleaved-1f1b", p, m, v)
            continue
        schedule = build("interleaved-1f1b", p, m, v)
        check(schedule)
        assert [[tuple(a) for a in order] for order in schedule.orders] == interleaved_by_rule(
            p, m, v
        )


@pytest.mark.parametrize("v", CHUNKS)
@pytest.mark.parametrize("p", RANKS)
def test_closed_forms_of_interleaved_with_whole_groups(p, v):
    for m in range(p, 34, p):
        timeline = simulate(build("interleaved-1f1b", p, m, v), Costs.uniform(p * v))
        assert timeline.makespan == timeline.span == 3 * m * v + 3 * (p - 1)
        assert timeline.peak_activations[0] == min(2 * (p - 1) + (v - 1) * p + 1, m * v)
        assert timeline.peak_activations == tuple(
            min(2 * (p - r - 1) + (v - 1) * p + 1, m * v) for r in range(p)
        )


@pytest.mark.parametrize("v", CHUNKS)
@pytest.mark.parametrize("p", RANKS)
def test_peaks_of_interleaved_with_groups_of_any_size(p, v):
    for m in (m for m in MICROBATCHES if m % max(1, m // p) == 0):
        g = m // max(1, m // p)
        timeline = simulate(build("interleaved-1f1b", p, m, v), Costs.uniform(p * v))
        assert timeline.peak_activations == tuple(
            min(2 * (p - r - 1) + (v - 1) * g + 1, m * v) for r in range(p)
        )
        work = 3 * m * v
        assert timeline.makespan >= work + 3 * (p - 1) if m >= p else timeline.makespan > work


@pytest.mark.parametrize("p", RANKS)
def test_interleaved_with_one_chunk_has_1f1bs_warm_up_twice_as_deep_and_its_time(p):
    for m in range(p, 34, p):
        one, deep = build("1f1b", p, m), build("interleaved-1f1b", p, m, 1)
        assert one.placement == deep.placement
        costs = Costs.uniform(p)
        assert simulate(one, costs).makespan == simulate(deep, costs).makespan


VALUES = {  # the table of values of the schedule rules
    ("gpipe", 4, 8): (33, 33, 8),
    ("gpipe", 8, 32): (117, 117, 32),
    ("1f1b", 4, 8): (33, 33, 4),
    ("1f1b", 8, 32): (117, 117, 8),
    ("interleaved-1f1b", 4, 8): (57, 57, 11),
    ("interleaved-1f1b", 8, 32): (213, 213, 23),
}


@pytest.mark.parametrize(("name", "p", "m"), VALUES)
def test_the_table_of_values(name, p, m):
    schedule = build(name, p, m)
    timeline = simulate(schedule, Costs.uniform(schedule.stages))
    assert (timeline.makespan, timeline.span, max(timeline.peak_activations)) == VALUES[name, p, m]


@pytest.mark.parametrize("p", [*RANKS, 24])
def test_sizes_that_are_refused_name_the_nearest_ones_that_work(p):
    refused = 0
    for m in [*range(1, 80), 511]:
        try:
            build("interleaved-1f1b", p, m)
        except ScheduleError as error:
            refused += 1
            below, above = map(int, re.findall(r"\d+", error.cure)[:2])
            assert below < m < above
            works = [n for n in range(below, above + 1) if n % max(1, n // p) == 0]
            assert works == [below, above]
            for n in works:
                check(build("interleaved-1f1b", p, n))
    assert (refused > 0) == (p > 1)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("1F1B", "'1f1b'"),
        ("1fb1", "'1f1b'"),
        ("gpip", "'gpipe'"),
        ("interleaved", "'interleaved-1f1b'"),
        ("interleaved_1f1b", "'interleaved-1f1b'"),
        ("qqq", "take one of them"),
        ("", "take one of them"),
        (None, "take one of them"),
        ([], "take one of them"),
    ],
)
def test_an_unknown_name_lists_the_names_and_guesses(name, hint):
    with pytest.raises(ScheduleError, match="schedules are gpipe, 1f1b") as error:
        build(name, 2, 2)
    assert hint in error.value.cure


@pytest.mark.parametrize("what", ["ranks", "microbatches", "chunks"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "2", True, False, []])
@pytest.mark.parametrize("name", FAMILIES)
def test_sizes_are_whole_numbers_of_at_least_one(name, what, value):
    sizes = {"ranks": 2, "microbatches": 2, "chunks": None} | {what: value}
    with pytest.raises(ScheduleError, match=f"{what} is a whole number of at least 1"):
        build_schedule(name, **sizes)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_chunk_schedules_take_no_other_number(name):
    assert build(name, 2, 2, 1) == build(name, 2, 2)
    with pytest.raises(ScheduleError, match="places 1 stage on each rank; 2 were asked"):
        build(name, 2, 2, 2)


def test_interleaved_has_two_chunks_unless_told():
    assert build("interleaved-1f1b", 2, 4) == build("interleaved-1f1b", 2, 4, 2)
    assert build("interleaved-1f1b", 2, 4, 3).stages == 6


@pytest.mark.parametrize("name", FAMILIES)
def test_a_schedule_carries_the_name_it_was_asked_by(name):
    assert build(name, 2, 4).name == name
    assert isinstance(FAMILIES[name], Family)
    assert FAMILIES[name].summary


def test_the_registry_cannot_be_changed_from_outside():
    with pytest.raises(TypeError):
        FAMILIES["mine"] = FAMILIES["gpipe"]


@pytest.mark.parametrize("name", FAMILIES)
def test_building_is_a_pure_function(name):
    assert build(name, 4, 8) == build(name, 4, 8)
    steps = [step for order in build(name, 4, 8).orders for step in order]
    assert {type(step) for step in steps} <= {Action, FusedPair}
    assert {type(a) for step in steps for a in flatten(step)} == {Action}
