"""Placements: stage -> rank."""

from __future__ import annotations

import pytest

from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.placement import linear, loop, vee
from npu_pipe.ir.schedule import Schedule


def test_the_three_shapes_of_the_docstring():
    assert linear(4) == (0, 1, 2, 3)
    assert loop(4, 2) == (0, 1, 2, 3, 0, 1, 2, 3)
    assert vee(4) == (0, 1, 2, 3, 3, 2, 1, 0)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_loop_and_vee_follow_their_formulas(ranks):
    for chunks in range(1, 5):
        placement = loop(ranks, chunks)
        assert all(placement[c * ranks + r] == r for c in range(chunks) for r in range(ranks))
        assert len(placement) == chunks * ranks
    placement = vee(ranks)
    assert all(placement[r] == placement[2 * ranks - 1 - r] == r for r in range(ranks))
    assert loop(ranks, 1) == linear(ranks)


def test_a_rank_knows_its_stages_in_forward_order():
    schedule = Schedule("v", 1, vee(3), ((), (), ()))
    assert [schedule.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


def test_a_mirrored_microbatch_runs_on_the_rank_across():
    schedule = Schedule("both ways", 2, linear(4), ((), (), (), ()), mirrored=(1,))
    assert [schedule.rank_of(Action(Kind.F, stage, 0)) for stage in range(4)] == [0, 1, 2, 3]
    assert [schedule.rank_of(Action(Kind.B, stage, 1)) for stage in range(4)] == [3, 2, 1, 0]
    assert [schedule.stages_of(rank) for rank in range(4)] == [(0, 3), (1, 2), (1, 2), (0, 3)]
