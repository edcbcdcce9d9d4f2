"""`check` of a schedule: each way to be wrong has its story, place and cure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from npu_pipe import FusedPair, Schedule, build_schedule, check
from npu_pipe.errors import DeadlockError, ScheduleError
from npu_pipe.ir.placement import linear
from npu_pipe.ir.text import parse_orders

GOOD = build_schedule("1f1b", ranks=2, microbatches=2)


def of(text: str, *, placement=None, microbatches=2, **fields) -> Schedule:
    orders = parse_orders(text)
    placement = linear(len(orders)) if placement is None else placement
    return Schedule("test", microbatches, placement, orders, **fields)


def refused(schedule: Schedule, match: str) -> ScheduleError:
    with pytest.raises(ScheduleError, match=match) as error:
        check(schedule)
    assert all(str(error.value).split("; "))
    assert str(error.value).count("; ") == 2
    return error.value


def test_the_good_one_passes():
    check(GOOD)
    check(of("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1I1 1W1"))
    check(of("rank 0: 0F0 0F1\nrank 1: 1F0 1F1", training=False))


def test_a_missing_forward_is_named_with_its_rank():
    error = refused(of("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1B0 1B1"), "1F1 is missing on rank 1")
    assert (error.rank, error.position, error.action) == (1, None, "1F1")
    assert "add it to the order of rank 1" in error.cure


def test_a_missing_backward_names_both_of_its_forms():
    error = refused(
        of("rank 0: 0F0 0B0 0F1\nrank 1: 1F0 1B0 1F1 1B1"), r"0I1 \(nor 0B1\) is missing on rank 0"
    )
    assert error.rank == 0


def test_an_input_gradient_without_its_weight_gradient_is_not_a_backward():
    refused(of("rank 0: 0F0 0B0 0F1 0I1\nrank 1: 1F0 1B0 1F1 1B1"), r"0W1 \(nor 0B1\) is missing")


def test_a_whole_backward_and_its_halves_do_not_go_together():
    error = refused(
        of("rank 0: 0F0 0B0 0F1 0B1 0W1\nrank 1: 1F0 1B0 1F1 1B1"),
        "rank 0 has 0B1 at position 3: its stage and microbatch have both forms",
    )
    assert (error.rank, error.position, error.action) == (0, 3, "0B1")


def test_an_action_that_is_there_twice():
    error = refused(
        of("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1B0 1F1 1F1 1B1"),
        "rank 1 has 1F1 at position 3: it is there more than once",
    )
    assert (error.rank, error.position) == (1, 3)


@pytest.mark.parametrize("action", ["2F0", "0F2", "99B0", "0W99"])
def test_stages_and_microbatches_that_do_not_exist(action):
    error = refused(
        of(f"rank 0: 0F0 0B0 {action} 0F1 0B1\nrank 1: 1F0 1B0 1F1 1B1"),
        f"rank 0 has {action} at position 2",
    )
    assert (error.rank, error.position, error.action) == (0, 2, action)
    assert "stages 0..1 and microbatches 0..1" in error.rule


def test_transfers_have_no_place_in_a_schedule():
    error = refused(
        of("rank 0: 0F0 0SEND_F0 0B0 0F1 0B1\nrank 1: 1F0 1B0 1F1 1B1"), "0SEND_F0 at position 1"
    )
    assert "lower() places transfers" in error.cure


def test_an_evaluation_has_forwards_only():
    refused(
        of("rank 0: 0F0 0F1\nrank 1: 1F0 1F1 1B1", training=False), "rank 1 has 1B1 at position 2"
    )


def test_an_action_on_a_rank_that_does_not_hold_its_stage():
    error = refused(
        of("rank 0: 0F0 1F0 0B0 0F1 0B1\nrank 1: 1B0 1F1 1B1"),
        "rank 0 has 1F0 at position 1: its stage lies on rank 1",
    )
    assert "move it to rank 1" in error.cure


def test_a_mirrored_microbatch_on_the_wrong_replica():
    refused(
        of("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1B0 1F1 1B1", mirrored=(1,)),
        "rank 0 has 0F1 at position 2: its stage lies on rank 1",
    )


def test_a_backward_before_its_own_forward():
    error = refused(
        of("rank 0: 0F0 0B0 0B1 0F1\nrank 1: 1F0 1B0 1F1 1B1"),
        "rank 0 has 0B1 at position 2: it needs 0F1, which comes at position 3",
    )
    assert error.cure == "swap them"


def test_a_weight_gradient_before_its_input_gradient():
    refused(
        of("rank 0: 0F0 0W0 0I0\nrank 1: 1F0 1B0", microbatches=1),
        "rank 0 has 0W0 at position 1: it needs 0I0, which comes at position 2",
    )


def test_neighbouring_stages_of_one_rank_in_the_wrong_order():
    refused(
        of("rank 0: 1F0 0F0 1B0 0B0", placement=(0, 0), microbatches=1),
        "rank 0 has 1F0 at position 0: it needs 0F0, which comes at position 1",
    )


@pytest.mark.parametrize(
    "pair", ["(1F0;0B0)OVERLAP_F_B", "(0F0;0B0)OVERLAP_F_B", "(0F0;1B0)OVERLAP_F_B"]
)
def test_a_fused_pair_of_one_microbatch_would_wait_for_itself(pair):
    rest = {
        "(1F0;0B0)OVERLAP_F_B": f"0F0 {pair} 1B0",
        "(0F0;0B0)OVERLAP_F_B": f"1F0 1B0 {pair}",
        "(0F0;1B0)OVERLAP_F_B": f"{pair} 1F0 0B0",
    }
    with pytest.raises(ScheduleError):
        check(of(f"rank 0: {rest[pair]}", placement=(0, 0), microbatches=1))


def test_halves_of_a_pair_are_a_forward_and_a_backward():
    a, b = GOOD.orders[0][0], GOOD.orders[0][1]
    wrong = replace(GOOD, orders=((FusedPair(a, b), *GOOD.orders[0][2:]), GOOD.orders[1]))
    error = refused(wrong, "rank 0 has 0F0 at position 0: it is paired with 0F1")
    assert "one F and one B" in error.rule


def test_ranks_that_wait_in_a_circle_are_named_with_the_circle():
    with pytest.raises(DeadlockError) as error:
        check(of("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1F1 1B0 1B1"))
    assert set(error.value.cycle) == {(0, "0B0"), (1, "1F1")}
    assert "rank 0 at position 1 waits in 0B0 for 1B0 of rank 1 at position 2" in str(error.value)
    assert "rank 1 at position 1 waits in 1F1 for 0F1 of rank 0 at position 2" in str(error.value)
    assert (error.value.rank, error.value.position) in {(0, 1), (1, 1)}


def test_the_circle_leaves_out_ranks_that_only_wait_for_it():
    text = (
        "rank 0: 0F0 0F1 0B0 0B1\n"
        "rank 1: 1F0 1B0 1F1 1B1\n"
        "rank 2: 2F0 2F1 2B0 2B1"
    )  # fmt: skip
    with pytest.raises(DeadlockError) as error:
        check(of(text))
    assert {rank for rank, _ in error.value.cycle} == {1, 2}


def test_a_circle_through_a_fused_pair_shows_the_pair():
    text = (
        "rank 0: 0F0 (0F1;0B0)OVERLAP_F_B 0B1\n"
        "rank 1: 1F0 (1F1;1B0)OVERLAP_F_B 1B1"
    )  # fmt: skip
    with pytest.raises(DeadlockError, match=r"waits in \(0F1;0B0\)OVERLAP_F_B for \(1F1;1B0\)"):
        check(of(text))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"orders": ()}, "0 ranks, 2 stages and 2 microbatches were given"),
        ({"placement": ()}, "2 ranks, 0 stages and 2 microbatches"),
        ({"microbatches": 0}, "2 ranks, 2 stages and 0 microbatches"),
        ({"microbatches": -3}, "and -3 microbatches"),
        ({"placement": (0, 2)}, "stage 1 is placed on rank 2"),
        ({"placement": (0, -1)}, "stage 1 is placed on rank -1"),
        ({"placement": (0, 10**30)}, "stage 1 is placed on rank 1000"),
        ({"placement": (0, 0)}, "rank 1 holds none"),
        ({"mirrored": (2,)}, r"it is \(2,\)"),
        ({"mirrored": (-1,)}, r"it is \(-1,\)"),
        ({"mirrored": (1, 1)}, r"once each and in ascending order"),
        ({"mirrored": (1, 0)}, r"once each and in ascending order"),
        ({"orders": ((), ())}, "0F0 is missing on rank 0"),
        ({"microbatches": 3}, "0F2 is missing on rank 0"),
        ({"microbatches": 10**9}, "0F2 is missing on rank 0"),
        ({"microbatches": 10**30}, "0F2 is missing on rank 0"),
        ({"placement": (0, 1) * 100}, "2F0 is missing on rank 0"),
    ],
)
def test_sizes_that_do_not_fit(fields, match):
    refused(replace(GOOD, **fields), match)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", None),
        ("name", 1),
        ("microbatches", "2"),
        ("microbatches", 2.0),
        ("microbatches", True),
        ("microbatches", None),
        ("microbatches", np.int64(2)),
        ("placement", None),
        ("placement", [0, 1]),
        ("placement", (0, 1.0)),
        ("placement", (False, True)),
        ("placement", (0, "1")),
        ("placement", (0, None)),
        ("placement", np.array([0, 1])),
        ("placement", tuple(np.array([0, 1]))),
        ("mirrored", None),
        ("mirrored", [0]),
        ("mirrored", {0}),
        ("mirrored", (True,)),
        ("mirrored", ("0",)),
        ("training", None),
        ("training", 1),
        ("orders", None),
        ("orders", 2),
        ("orders", "0F0"),
        ("orders", list(GOOD.orders)),
        ("orders", (list(GOOD.orders[0]), GOOD.orders[1])),
        ("orders", (GOOD.orders[0], None)),
        ("orders", ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")),
    ],
    ids=str,
)
def test_fields_of_another_type_are_refused_by_name(field, value):
    error = refused(replace(GOOD, **{field: value}), f"{field} is ")
    assert error.cure == f"give {field} in that form"


@pytest.mark.parametrize("subject", [None, "1f1b", 4, GOOD.orders], ids=type)
def test_only_schedules_and_programs_can_be_checked(subject):
    with pytest.raises(ScheduleError, match="only a Schedule or a Program"):
        check(subject)
