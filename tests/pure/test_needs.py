"""The dependency rule, and the table that resolves it for whole schedules and programs."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from core_helpers.random_cases import gives, random_schedule, wants
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_pipe import lower
from npu_pipe.errors import ScheduleError
from npu_pipe.ir.action import Action, FusedPair, Kind, flatten, parse_step
from npu_pipe.ir.needs import Table, needs

seeds = st.integers(0, 2**32)


@pytest.mark.parametrize(
    ("action", "needed"),
    [
        ("0F1", []),
        ("2F1", ["1F1"]),
        ("2B1", ["2F1", "3I1"]),
        ("2I1", ["2F1", "3I1"]),
        ("3B1", ["3F1"]),
        ("3I1", ["3F1"]),
        ("2W1", ["2I1"]),
        ("2SEND_F1", ["2F1"]),
        ("2RECV_F1", ["1SEND_F1"]),
        ("2SEND_B1", ["2I1"]),
        ("2RECV_B1", ["3SEND_B1"]),
    ],
)
def test_the_rule_with_four_stages(action, needed):
    assert [str(need) for need in needs(parse_step(action), stages=4)] == needed


@given(seeds)
@settings(derandomize=True, deadline=None, max_examples=100)
def test_the_rule_says_the_same_as_its_words(seed):
    schedule = random_schedule(Random(seed))
    for action in (a for order in schedule.orders for step in order for a in flatten(step)):
        facts = set().union(*map(gives, needs(action, schedule.stages)), set())
        assert wants(action, schedule.stages) <= facts


@given(seeds)
@settings(derandomize=True, deadline=None, max_examples=100)
def test_the_table_resolves_the_rule_row_by_row(seed):
    schedule = random_schedule(Random(seed))
    for orders in (schedule.orders, lower(schedule).orders):
        table = Table.of(orders)
        flat = [
            (rank, position, action)
            for rank, order in enumerate(orders)
            for position, step in enumerate(order)
            for action in flatten(step)
        ]
        assert len(table) == len(flat)
        row_of = {action: row for row, (_, _, action) in enumerate(flat)}
        for (_, s, i), row in [(a, r) for a, r in row_of.items() if a.kind is Kind.B]:
            row_of[Action(Kind.I, s, i)] = row
        needed = table.needs(table.where(schedule.stages, schedule.microbatches))
        for row, (rank, position, action) in enumerate(flat):
            assert (table.rank[row], table.position[row]) == (rank, position)
            assert table.action(row) == action
            expected = set()
            for need in needs(action, schedule.stages):
                kind = Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B
                receive = Action(kind, action.stage, action.microbatch)
                across = need.stage != action.stage and action.kind.is_compute
                expected.add(row_of[receive if across and receive in row_of else need])
            assert {need for need in needed[row].tolist() if need >= 0} == expected


def test_a_fused_pair_takes_two_rows_and_one_position():
    pair = parse_step("(0F1;0B0)OVERLAP_F_B")
    table = Table.of(((Action(Kind.F, 0, 0), pair, Action(Kind.B, 0, 1)), ()))
    assert table.position.tolist() == [0, 1, 1, 2]
    assert table.joined.tolist() == [False, True, False, False]
    assert table.lead.tolist() == [0, 1, 1, 3]
    assert table.step_rows().tolist() == [0, 1, 3]
    assert table.starts.tolist() == [0, 4, 4]
    assert table.step(1) == pair


def test_an_empty_table_is_a_table():
    assert len(Table.of(())) == 0
    assert Table.of(((), ())).starts.tolist() == [0, 0, 0]


GOOD = Action(Kind.F, 0, 0)


@pytest.mark.parametrize(
    "junk",
    [
        "0F0",
        None,
        0,
        1.5,
        True,
        Ellipsis,
        [],
        ("F", 0, 0),
        (Kind.F, 0, 0),
        Action("F", 0, 0),
        Action(Kind.F, 0.0, 0),
        Action(Kind.F, 0, 0.5),
        Action(Kind.F, True, 0),
        Action(Kind.F, 0, False),
        Action(Kind.F, "0", 0),
        Action(Kind.F, None, 0),
        Action(0, 0, 0),
        Action(0, Kind.F, 0),
        Action(Kind.F, 2**63, 0),
        Action(Kind.F, 0, 10**30),
        Action(Kind.F, float("nan"), 0),
        FusedPair(GOOD, None),
        FusedPair(None, GOOD),
        FusedPair("0F0", "0B0"),
        FusedPair(FusedPair(GOOD, GOOD), GOOD),
    ],
    ids=repr,
)
def test_what_is_no_step_is_named_with_its_place(junk):
    with pytest.raises(ScheduleError, match=r"rank 1 has .* at position 1") as refused:
        Table.of(((GOOD,), (GOOD, junk, GOOD)))
    assert (refused.value.rank, refused.value.position) == (1, 1)


def test_numpy_numbers_are_no_whole_numbers_here():
    with pytest.raises(ScheduleError, match=r"rank 0 has .* at position 0"):
        Table.of(((Action(Kind.F, np.int64(0), 0),),))
