"""Layers are cut where the largest stage is smallest, and evenly."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_pipe.errors import PartitionError
from npu_pipe.partition.partition import partition


def every_cut(layers: int, stages: int) -> list[tuple[range, ...]]:
    return [
        tuple(map(range, (0, *inner), (*inner, layers)))
        for inner in combinations(range(1, layers), stages - 1)
    ]


def quality(costs: list[float], cut: tuple[range, ...]) -> tuple[float, float]:
    sums = [sum(costs[i] for i in layers) for layers in cut]
    return max(sums), sum(cost**2 for cost in sums)


def test_equal_layers_are_shared_out_evenly() -> None:
    assert partition([1.0] * 8, stages=4) == (range(2), range(2, 4), range(4, 6), range(6, 8))


def test_one_stage_holds_everything() -> None:
    assert partition([3, 1, 2], stages=1) == (range(3),)


def test_the_drawn_case() -> None:
    stages = partition([1, 4, 4, 4, 4, 4, 4, 4, 4, 2], stages=4)
    assert stages == (range(3), range(3, 5), range(5, 7), range(7, 10))


def test_free_layers_still_get_a_stage() -> None:
    assert partition([0, 0, 0], stages=3) == (range(1), range(1, 2), range(2, 3))


def test_among_the_cuts_with_the_same_largest_stage_the_even_one_is_taken() -> None:
    # 5 alone is the largest either way; 1 1 1 1 splits 2 + 2 rather than 1 + 3.
    assert partition([5, 1, 1, 1, 1], stages=3) == (range(1), range(1, 3), range(3, 5))


@given(st.data())
def test_no_other_cut_is_better(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 20).map(float), min_size=1, max_size=8))
    stages = data.draw(st.integers(1, len(costs)))
    cut = partition(costs, stages=stages)
    assert cut in every_cut(len(costs), stages)
    assert quality(costs, cut) == min(quality(costs, c) for c in every_cut(len(costs), stages))
    assert all(before.stop == after.start for before, after in pairwise(cut))


@pytest.mark.parametrize(
    ("costs", "stages", "words"),
    [
        ([1, 1], 3, "2 layers were given for 3 stages"),
        ([], 1, "0 layers"),
        ([1], 0, "0 were asked for"),
        ([1], True, "True were asked for"),
        ([1, float("nan")], 1, "layer 1 costs nan"),
        ([-1.0], 1, "layer 0 costs -1.0"),
    ],
)
def test_what_cannot_be_cut_is_refused(costs: list[float], stages: int, words: str) -> None:
    with pytest.raises(PartitionError, match=words):
        partition(costs, stages=stages)
