"""Whole orders as a grid of text."""

from __future__ import annotations

from random import Random

import pytest
from core_helpers.random_cases import random_schedule
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_pipe import build_schedule, lower
from npu_pipe.errors import ScheduleError
from npu_pipe.ir.text import format_orders, parse_orders


def test_the_grid_reads_like_the_picture_in_the_docs():
    schedule = build_schedule("1f1b", ranks=2, microbatches=2)
    assert format_orders(schedule.orders) == (
        "rank 0: 0F0 0F1 0B0 0B1\n"
        "rank 1: 1F0 1B0 1F1 1B1"
    )  # fmt: skip


def test_columns_stay_aligned_when_widths_differ():
    orders = lower(build_schedule("1f1b", ranks=2, microbatches=1)).orders
    assert format_orders(orders) == (
        "rank 0: 0F0      0SEND_F0 0RECV_B0 0B0\n"
        "rank 1: 1RECV_F0 1F0      1B0      1SEND_B0"
    )  # fmt: skip


@given(st.integers(0, 2**32))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_schedules_and_programs_survive_the_grid(seed):
    schedule = random_schedule(Random(seed))
    assert parse_orders(format_orders(schedule.orders)) == schedule.orders
    program = lower(schedule)
    assert parse_orders(format_orders(program.orders)) == program.orders


@pytest.mark.parametrize("orders", [(), ((),), ((), ())])
def test_empty_orders_survive_too(orders):
    assert parse_orders(format_orders(orders)) == orders


@pytest.mark.parametrize(
    "text",
    [
        "0F0",
        "rank 1: 0F0",
        "rank 0: 0F0\nrank 2: 1F0",
        "rank 0: 0F0\nrank 0: 1F0",
        "Rank 0: 0F0",
        " rank 0: 0F0",
        "rank 0 : 0F0",
        "rank\u00a00: 0F0",
        "rank 00: 0F0",
        "rank 0: 0F0,0B0",
        "rank 0: 0F0\t0B0",
        "rank 0: 0F0\u00a00B0",
        "rank 0: 0F0\u20280B0",
        "rank 0: 0F0\r\nrank 1: 1F0",
        "rank 0: (0F0; 0B1)OVERLAP_F_B",
    ],
)
def test_another_form_is_refused(text):
    with pytest.raises(ScheduleError):
        parse_orders(text)


def test_a_bad_action_is_named_with_its_rank_and_position():
    with pytest.raises(ScheduleError, match="rank 1 has it at position 2") as refused:
        parse_orders("rank 0: 0F0 0B0\nrank 1: 1F0 1B0 1X0")
    assert (refused.value.rank, refused.value.position) == (1, 2)
    assert refused.value.action == "1X0"
    assert "2F0" in refused.value.cure
