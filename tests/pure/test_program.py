"""`check` of a program: it keeps its schedule, and cannot hang with zero-buffer sends."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from npu_pipe import FusedPair, Lane, Program, build_schedule, check, lower
from npu_pipe.errors import DeadlockError, ScheduleError
from npu_pipe.ir.action import parse_step
from npu_pipe.ir.placement import loop, vee
from npu_pipe.ir.program import peer_of, route
from npu_pipe.ir.schedule import Schedule
from npu_pipe.ir.text import parse_orders

SCHEDULE = build_schedule("1f1b", ranks=2, microbatches=2)
GOOD = (
    "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
    "rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
)


def program(text: str, schedule: Schedule = SCHEDULE, prefetch: int = 2) -> Program:
    return Program(schedule, parse_orders(text), prefetch)


def changed(old: str, new: str) -> Program:
    assert GOOD.count(old) == 1
    return program(GOOD.replace(old, new))


def refused(subject: Program, match: str) -> ScheduleError:
    with pytest.raises(ScheduleError, match=match) as error:
        check(subject)
    return error.value


def test_the_good_one_passes():
    check(program(GOOD))


def test_sends_next_to_their_producers_hang_and_the_circle_is_shown():
    text = (
        "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    )
    with pytest.raises(DeadlockError) as error:
        check(program(text))
    assert set(error.value.cycle) == {(0, "0SEND_F1"), (1, "1SEND_B0")}
    assert "rank 0 at position 3 waits in 0SEND_F1 for 1RECV_F1 of rank 1" in str(error.value)
    assert "lower() orders transfers" in error.value.cure


def test_both_neighbours_sending_first_is_the_classic():
    schedule = Schedule(
        "cross", 2, (0, 1), parse_orders("rank 0: 0F0 1F1\nrank 1: 0F1 1F0"), (1,), training=False
    )
    text = "rank 0: 0F0 0SEND_F0 1RECV_F1 1F1\nrank 1: 0F1 0SEND_F1 1RECV_F0 1F0"
    with pytest.raises(DeadlockError) as error:
        check(program(text, schedule))
    assert error.value.cycle == ((0, "0SEND_F0"), (1, "0SEND_F1"))
    check(lower(schedule))


def test_another_order_of_compute_than_the_schedules():
    error = refused(
        program(GOOD.replace("0F0 0SEND_F0 0F1", "0F1 0F0 0SEND_F0")),
        "rank 0 computes 0F1 as number 0, where the schedule has 0F0",
    )
    assert (error.rank, error.position, error.action) == (0, 0, "0F1")


def test_compute_that_is_missing_or_there_twice():
    error = refused(changed(" 1B1 ", " "), "rank 1 computes nothing as number 3")
    assert (error.rank, error.position, error.action) == (1, 7, "1B1")
    error = refused(changed(" 1B1 ", " 1B1 1B1 "), "where the schedule has nothing")
    assert (error.rank, error.position, error.action) == (1, 7, "1B1")


def test_a_missing_transfer_is_named():
    error = refused(changed(" 0SEND_F1", ""), "0SEND_F1 is missing on rank 0")
    assert (error.rank, error.action) == (0, "0SEND_F1")
    refused(changed(" 1RECV_F1", ""), "1RECV_F1 is missing on rank 1")


def test_a_transfer_too_many_is_named():
    error = refused(changed("0F1 0SEND_F1", "0F1 0SEND_F1 0SEND_F1"), "0SEND_F1 at position 4")
    assert "remove it" in error.cure
    refused(changed("1B1 1SEND_B1", "1B1 1SEND_B1 1SEND_F1"), "1SEND_F1 at position 8")
    refused(changed("0F0 0SEND_F0", "0F0 0SEND_F0 7SEND_F0"), "7SEND_F0 at position 2: there is no")


def test_a_transfer_on_the_wrong_rank():
    moved = GOOD.replace(" 0SEND_F1", "").replace("1RECV_F1 1B0", "1RECV_F1 0SEND_F1 1B0")
    refused(program(moved), "rank 1 has 0SEND_F1 at position 3")


def test_a_send_before_its_producer_and_a_receive_after_its_consumer():
    error = refused(
        changed("0F0 0SEND_F0", "0SEND_F0 0F0"), "rank 0 has 0SEND_F0 at position 0: it needs 0F0"
    )
    assert error.cure == "swap them"
    refused(changed("1RECV_F0 1F0", "1F0 1RECV_F0"), "rank 1 has 1F0 at position 0: it needs 1RECV")


def test_sends_and_receives_of_a_lane_in_different_orders():
    late = "rank 0: 0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1\n" + GOOD.splitlines()[1]
    error = refused(program(late), "it stands where rank 0 sends 0SEND_F1, to be received by 1RECV")
    assert (error.rank, error.action) == (1, "1RECV_F0")


def test_more_receives_ahead_than_prefetch_allows():
    error = refused(program(GOOD.replace("1F0 1RECV_F1", "1RECV_F1 1F0"), prefetch=1), "number 2")
    assert (error.rank, error.position, error.action) == (1, 1, "1RECV_F1")
    assert "raise prefetch" in error.cure
    check(program(GOOD.replace("1F0 1RECV_F1", "1RECV_F1 1F0"), prefetch=2))


@pytest.mark.parametrize("prefetch", [0, -1, 1.0, True, None, "2"])
def test_prefetch_is_a_whole_number_of_at_least_one(prefetch):
    refused(program(GOOD, prefetch=prefetch), "prefetch counts the inputs")
    with pytest.raises(ScheduleError, match="prefetch counts the inputs"):
        lower(SCHEDULE, prefetch=prefetch)


@pytest.mark.parametrize(
    "orders",
    [None, (), ((),), ((), (), ()), [(), ()], ("0F0", "1F0"), (None, None), ((None,), ())],
    ids=str,
)
def test_orders_of_another_form_are_refused(orders):
    with pytest.raises(ScheduleError):
        check(Program(SCHEDULE, orders))


def test_a_program_without_a_schedule_or_with_a_bad_one():
    with pytest.raises(ScheduleError, match="only a Schedule or a Program"):
        check(Program(None, parse_orders(GOOD)))
    refused(program(GOOD, replace(SCHEDULE, placement=(1, 0))), "its stage lies on rank 1")


def test_a_pair_cannot_hide_a_transfer():
    pair = FusedPair(parse_step("0F1"), parse_step("0SEND_F0"))
    order = (parse_step("0F0"), pair, *parse_orders(GOOD)[0][3:])
    refused(Program(SCHEDULE, (order, parse_orders(GOOD)[1])), "a fused pair is one F and one B")


@pytest.mark.parametrize(
    ("one", "other"), [("1SEND_F3", "2RECV_F3"), ("2SEND_B3", "1RECV_B3"), ("0SEND_F0", "1RECV_F0")]
)
def test_both_ends_of_a_transfer_know_each_other(one, other):
    assert str(peer_of(parse_step(one))) == other
    assert str(peer_of(parse_step(other))) == one


@pytest.mark.parametrize(
    ("placement", "transfer", "source", "target", "lane"),
    [
        (loop(2, 2), "0SEND_F0", 0, 1, Lane.DOWN),
        (loop(2, 2), "1SEND_F0", 1, 0, Lane.UP),
        (loop(2, 2), "2RECV_F0", 1, 0, Lane.UP),
        (loop(2, 2), "2SEND_B0", 0, 1, Lane.DOWN),
        (vee(3), "3SEND_F0", 2, 1, Lane.UP),
        (vee(3), "4SEND_B0", 1, 2, Lane.DOWN),
        (vee(3), "3RECV_B0", 1, 2, Lane.DOWN),
    ],
)
def test_the_lane_of_a_transfer_is_its_direction_between_ranks(
    placement, transfer, source, target, lane
):
    schedule = Schedule("test", 1, placement, ((),) * (max(placement) + 1))
    assert route(schedule, parse_step(transfer)) == (source, target, lane)


def test_schedules_and_programs_cannot_be_changed():
    for value, field in ((SCHEDULE, "orders"), (program(GOOD), "prefetch")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, field, None)
        assert hash(value) == hash(replace(value))
