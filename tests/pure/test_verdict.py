"""Who is to blame when nothing moves, from what each rank was last seen at."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_pipe.comm.board import Board, Place, State
from npu_pipe.comm.verdict import Seen, died, judge, left, table
from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.mark import Mark, from_int, to_int

LIMIT_S = 8.0


def at(action: Action, source: int | None = None, *, calls: int = 6) -> Place:
    return Place(to_int(action, source), calls, State.RUNNING, "step 5")


def outside(calls: int, call: str) -> Place:
    return Place(0, calls, State.OUTSIDE, call)


MEETING = Place(0, 6, State.MEETING, "step 5")
F23 = Action(Kind.F, 2, 3)


@given(
    st.sampled_from(list(Kind)),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**24 - 1),
    st.none() | st.integers(0, 2**15 - 2),
)
def test_a_mark_is_an_int64_and_back(
    kind: Kind, stage: int, microbatch: int, source: int | None
) -> None:
    value = to_int(Action(kind, stage, microbatch), source)
    assert 0 < value < 2**63
    assert from_int(value) == Mark(Action(kind, stage, microbatch), source)


def test_a_board_tells_what_was_written_on_it() -> None:
    board = Board()
    assert str(board.place) == "before its first call"
    board.begin(6, "step 5")
    assert str(board.place) == "preparing step 5"
    with board.during(State.MEETING):
        assert str(board.place) == "in step 5, meeting the other ranks"
        assert board.place.waits
    with board.during(State.RUNNING):
        board.cells[0] = to_int(F23, 1)
        assert str(board.place) == (
            "before 2F3 of step 5 (stage 2, forward of microbatch 3), waiting for rank 1"
        )
        board.cells[0] = to_int(F23)
        assert str(board.place) == "in 2F3 of step 5 (stage 2, forward of microbatch 3)"
        assert not board.place.waits
        board.cells[0] = 0
        assert str(board.place) == "at the end of step 5"
    board.end()
    assert str(board.place) == "after step 5"


def test_a_board_outlives_the_file_that_it_is_shared_by() -> None:
    board = Board()
    board.begin(1, "step 1")
    path = board.share()
    try:
        assert path.stat().st_size == 128
        assert board.place.call == "step 1"
    finally:
        path.unlink()
    board.begin(2, "step 2")
    board.withdraw()
    assert board.place.call == "step 2"


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_every_rank_that_waits_blames_the_one_that_computes(rank: int) -> None:
    seen = {
        0: Seen(at(Action(Kind.B, 0, 1), 1), 8.4, 0.1),
        1: Seen(at(Action(Kind.B, 1, 1), 2), 8.3, 0.1),
        2: Seen(at(F23), 8.1, 0.1),
        3: Seen(at(Action(Kind.F, 3, 3), 2), 0.2, 0.1),  # and not for how long one has waited
    }
    cause = judge(rank, seen, timeout_s=LIMIT_S)
    assert cause is not None
    assert "rank 2 has been in 2F3 of step 5 (stage 2, forward of microbatch 3) for 8.1 s" in (
        cause.facts
    )
    assert "raise timeout_s" in cause.cure
    assert judge(2, seen, timeout_s=LIMIT_S) is None


def test_a_long_wait_is_no_failure_while_somebody_gets_on() -> None:
    seen = {
        0: Seen(at(Action(Kind.B, 0, 1), 1), 100.0, 0.1),
        1: Seen(at(Action(Kind.B, 1, 1), 2), 60.0, 0.1),
        2: Seen(at(F23), 7.9, 0.1),
    }
    assert judge(0, seen, timeout_s=LIMIT_S) is None


def test_silence_is_blamed_whatever_the_rank_was_at() -> None:
    for place in (at(F23), at(F23, 1), MEETING, outside(6, "step 5")):
        seen = {0: Seen(MEETING, 1.0, 0.0), 2: Seen(place, 8.2, 8.2)}
        cause = judge(0, seen, timeout_s=LIMIT_S)
        assert cause is not None
        assert cause.facts.startswith("rank 2 has not been heard of for 8.2 s; it was seen ")


@pytest.mark.parametrize(("own_s", "waited_s"), [(100.0, 7.9), (7.9, 100.0)])
def test_a_rank_may_do_its_own_work_until_another_has_waited_for_it(
    own_s: float, waited_s: float
) -> None:
    def seen(own_s: float, waited_s: float) -> dict[int, Seen]:
        return {0: Seen(outside(5, "step 4"), own_s, 0.1), 1: Seen(MEETING, waited_s, 0.0)}

    assert judge(1, seen(own_s, waited_s), timeout_s=LIMIT_S) is None
    cause = judge(1, seen(own_s + 1, waited_s + 1), timeout_s=LIMIT_S)
    assert cause is not None
    assert "rank 0 has not called step 5: it has been at its own work after step 4" in cause.facts


def test_where_all_wait_the_connection_is_lost() -> None:
    seen = {
        0: Seen(at(Action(Kind.B, 0, 1), 1), 8.2, 0.1),
        1: Seen(at(Action(Kind.F, 1, 3), 0), 8.1, 0.1),
    }
    cause = judge(1, seen, timeout_s=LIMIT_S)
    assert cause is not None
    assert "none has moved for 8.1 s" in cause.facts
    assert "rank 0 is before 0B1 of step 5" in cause.facts
    assert "rank 1 is before 1F3 of step 5" in cause.facts
    seen[0] = Seen(seen[0].place, 7.9, 0.1)
    assert judge(1, seen, timeout_s=LIMIT_S) is None


def test_of_several_the_longest_stuck_is_blamed_by_all() -> None:
    seen = {
        0: Seen(at(F23, 1), 9.0, 0.0),
        1: Seen(at(Action(Kind.F, 1, 3)), 8.5, 0.1),
        2: Seen(at(Action(Kind.B, 2, 0)), 9.5, 0.1),
        3: Seen(MEETING, 1.0, 0.1),
    }
    causes = {judge(rank, seen, timeout_s=LIMIT_S) for rank in (0, 3)}
    (cause,) = causes
    assert cause is not None
    assert cause.facts.startswith("rank 2 ")


def test_who_dies_or_leaves_is_told_with_its_place() -> None:
    cause = died(2, at(F23), exact=True)
    assert "rank 2 was killed (or its machine was lost) in 2F3 of step 5" in cause.facts
    cause = died(2, at(F23), exact=False)
    assert "(or its machine was lost); it was last seen in 2F3 of step 5" in cause.facts
    assert "rank 0 ended or was killed" in died(0, outside(5, "step 4"), exact=True).facts
    assert left(1, outside(5, "step 4")).facts == "rank 1 closed its pipeline after step 4"


def test_the_table_tells_what_each_rank_is_at_and_waits_for() -> None:
    seen = {
        0: Seen(at(Action(Kind.B, 0, 1), 1), 8.4, 0.1),
        1: Seen(at(F23), 8.2, 8.2),
        2: Seen(MEETING, 1.0, 0.1),
    }
    assert table(seen, 4).splitlines() == [
        "rank  is                                  waits for   from       since",
        "0     0B1 of step 5                       gradient    rank 1     8.4 s",
        "1     2F3 of step 5, silent for 8.2 s                            8.2 s",
        "2     in step 5, meeting the other ranks  the others  all ranks  1.0 s",
        "3     gone",
    ]
