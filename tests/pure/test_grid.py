"""The text grid, against the tables of the seeds written out by hand."""

from __future__ import annotations

import pytest

from npu_pipe import (
    Action,
    Costs,
    FusedPair,
    Kind,
    Schedule,
    Span,
    Timeline,
    build_schedule,
    simulate,
)
from npu_pipe.errors import ConfigError
from npu_pipe.timeline.grid import common_step, lay_grid, text_grid


def predicted(name: str, ranks: int, microbatches: int, **costs: float) -> Timeline:
    schedule = build_schedule(name, ranks=ranks, microbatches=microbatches)
    return simulate(schedule, Costs.uniform(schedule.stages, **costs))


def one_slot_each(name: str, ranks: int, microbatches: int) -> Timeline:
    """F and B take one slot, as in the seeds."""
    return predicted(name, ranks, microbatches, forward=1, input_grad=1, weight_grad=0)


def test_gpipe_in_reverse_order_is_the_first_table_of_the_first_seed() -> None:
    assert text_grid(one_slot_each("gpipe", 2, 4)) == (
        "time    0  1  2  3  4  5  6  7  8  9\n"
        "rank 0  F0 F1 F2 F3 .. .. B3 B2 B1 B0\n"
        "rank 1  .. F0 F1 F2 F3 B3 B2 B1 B0 .."
    )


def test_1f1b_is_the_second_table_of_the_first_seed() -> None:
    assert text_grid(one_slot_each("1f1b", 2, 4)) == (
        "time    0  1  2  3  4  5  6  7  8  9\n"
        "rank 0  F0 F1 .. B0 F2 B1 F3 B2 .. B3\n"
        "rank 1  .. F0 B0 F1 B1 F2 B2 F3 B3 .."
    )


def test_gpipe_on_three_ranks_is_the_table_of_the_third_seed() -> None:
    assert text_grid(one_slot_each("gpipe", 3, 4)) == (
        "time    0  1  2  3  4  5  6  7  8  9  10 11\n"
        "rank 0  F0 F1 F2 F3 .. .. .. .. B3 B2 B1 B0\n"
        "rank 1  .. F0 F1 F2 F3 .. .. B3 B2 B1 B0 ..\n"
        "rank 2  .. .. F0 F1 F2 F3 B3 B2 B1 B0 .. .."
    )


def test_an_action_of_two_slots_reaches_over_both() -> None:
    assert text_grid(predicted("1f1b", 2, 3)) == (
        "time    0  1  2  3  4  5  6  7  8  9  10 11\n"
        "rank 0  F0 F1 .. .. B0--- F2 B1--- .. B2---\n"
        "rank 1  .. F0 B0--- F1 B1--- F2 B2--- .. .."
    )


def test_stages_are_named_where_ranks_hold_several() -> None:
    assert text_grid(predicted("interleaved-1f1b", 2, 2)) == (
        "time    0   1   2   3   4   5   6   7   8   9   10  11  12  13  14\n"
        "rank 0  0F0 0F1 2F0 2F1 ..  ..  2B0---- ..  2B1---- 0B0---- 0B1----\n"
        "rank 1  ..  1F0 1F1 3F0 3B0---- 3F1 3B1---- 1B0---- 1B1---- ..  .."
    )


def test_the_slot_is_the_greatest_common_step_and_is_told_when_it_is_not_one() -> None:
    halves = predicted("1f1b", 2, 3, forward=0.5, input_grad=0.25, weight_grad=0.25)
    assert text_grid(halves) == (
        "one column is 0.5\n"
        "time    0     1     2     3\n"
        "rank 0  F0 F1 .. B0 F2 B1 .. B2\n"
        "rank 1  .. F0 B0 F1 B1 F2 B2 .."
    )


def test_a_unit_may_be_asked_for() -> None:
    lines = text_grid(one_slot_each("gpipe", 2, 2), unit=0.5).splitlines()
    assert lines[0] == "one column is 0.5"
    assert lines[2] == "rank 0  F0--- F1--- .. .. .. .. B1--- B0---"


@pytest.mark.parametrize("unit", [0.0, -1.0, float("nan"), float("inf")])
def test_a_unit_is_a_positive_time(unit: float) -> None:
    with pytest.raises(ConfigError, match="positive"):
        text_grid(one_slot_each("gpipe", 2, 2), unit=unit)


def test_what_is_too_wide_becomes_a_strip_that_says_what_a_character_means() -> None:
    assert text_grid(predicted("1f1b", 2, 3), width=40) == (
        "one character is 0.5\n"
        "time    0         5         10\n"
        "rank 0  F0F1....B0--F2B1--..B2--\n"
        "rank 1  ..F0B0--F1B1--F2B2--...."
    )


def test_a_strip_writes_later_stages_small() -> None:
    assert text_grid(predicted("interleaved-1f1b", 2, 2), width=40).splitlines() == [
        "one character is 0.5; small letters are later stages of a rank",
        "time    0         5         10",
        "rank 0  F0F1f0f1....b0--..b1--B0--B1--",
        "rank 1  ..F0F1f0b0--f1b1--B0--B1--....",
    ]


def test_measured_times_have_no_common_step_and_their_strip_is_in_milliseconds() -> None:
    timeline = predicted("1f1b", 2, 4, forward=1000.123, input_grad=1100.77, weight_grad=900.3)
    lines = text_grid(timeline).splitlines()
    assert lines[0] == "one character is 0.2 ms"
    assert lines[2].startswith("rank 0  F0---F1---......")
    assert max(map(len, lines)) <= 108


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b"])
def test_no_line_is_wider_than_asked_for(name: str, width: int) -> None:
    timeline = predicted(name, 8, 32, forward=1, input_grad=1.1, weight_grad=0.9)
    lines = text_grid(timeline, width=width).splitlines()
    assert len(lines) >= 9
    assert max(map(len, lines[1:])) <= width


def test_a_coarse_strip_keeps_the_share_of_each_kind() -> None:
    row = text_grid(predicted("gpipe", 4, 200), width=60).splitlines()[-1][8:]
    # 200 F of one, 200 B of two, 9 idle, on 50 columns or so.
    assert row.count("F") == pytest.approx(len(row) / 3, abs=2)

    row = text_grid(predicted("1f1b", 4, 200), width=60).splitlines()[-1][8:]
    forwards = sum(row.count(letter) for letter in "F")
    assert forwards == pytest.approx(len(row) / 3, abs=3)


def test_a_fused_pair_shows_both_of_its_actions() -> None:
    forward, backward = Action(Kind.F, 0, 1), Action(Kind.B, 0, 0)
    pair = FusedPair(forward, backward)
    schedule = Schedule("pair", 2, (0,), ((Action(Kind.F, 0, 0), pair, Action(Kind.B, 0, 1)),))
    timeline = simulate(schedule, Costs.uniform(1))
    assert text_grid(timeline).splitlines()[1] == "rank 0  F0 F1;B0--- B1---"
    assert "&" in text_grid(timeline, width=10)


def test_ten_ranks_and_more_line_up() -> None:
    rows = text_grid(one_slot_each("1f1b", 12, 2)).splitlines()
    assert rows[1].startswith("rank 0   F0 F1 ..")
    assert rows[12].startswith("rank 11  .. ..")
    assert {row.index("F0") for row in rows[1:]} == {9 + 3 * rank for rank in range(12)}


def test_a_timeline_in_which_nothing_ran_is_idle() -> None:
    schedule = build_schedule("gpipe", ranks=2, microbatches=1)
    assert text_grid(Timeline(schedule, ())).count("rank") == 2


def test_cells_carry_their_step_for_who_colours_them() -> None:
    grid = lay_grid(one_slot_each("gpipe", 2, 2))
    assert [str(cell.step) for cell in grid.rows[0]] == ["0F0", "0F1", "None", "0B1", "0B0"]
    assert grid.rows[0][2].text == ".. .. "


def test_the_common_step() -> None:
    assert common_step([0.0, 1.0, 3.0]) == 1.0
    assert common_step([0.0, 0.5, 0.75]) == 0.25
    assert common_step([0.0, 200.0, 500.0]) == 100.0
    assert common_step([0.1 + 0.2, 0.6]) == pytest.approx(0.3)
    assert common_step([0.0, 1.23456789, 2.0]) is None
    assert common_step([0.0]) is None


def test_a_span_without_length_takes_no_cell() -> None:
    schedule = build_schedule("gpipe", ranks=1, microbatches=1)
    spans = (Span(0, Action(Kind.F, 0, 0), 0.0, 0.0), Span(0, Action(Kind.B, 0, 0), 0.0, 2.0))
    assert text_grid(Timeline(schedule, spans)).splitlines()[-1] == "rank 0  B0"
