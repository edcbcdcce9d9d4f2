"""The trial of transfers between neighbours: right bytes, plausible numbers, slow links found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster

Get = Callable[[int], Cluster]
pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("link", ["fastest_link", "gloo_link"])
def test_every_pair_is_tried_over_both_lanes_and_all_ranks_learn_the_same(
    cluster: Get, link: str
) -> None:
    answers = cluster(3).values("trials.trials", link=link)
    assert answers[0] == answers[1] == answers[2]
    assert [(trial["low"], trial["high"]) for trial in answers[0]] == [(0, 1), (1, 2)]
    for trial in answers[0]:
        assert trial["is_correct"]
        assert 0 < trial["latency_us"] < 1e6
        assert all(0 < trial[way] < 1e6 for way in ("down", "up", "both")), "bytes a us"


def test_pairs_that_are_no_chain_can_be_tried(cluster: Get) -> None:
    """As those of two pipelines, or of a loop."""
    found = cluster(4).values("trials.trials", pairs=[(0, 2), (1, 3), (0, 3)])[0]
    assert [(trial["low"], trial["high"]) for trial in found] == [(0, 2), (1, 3), (0, 3)]
    assert all(trial["is_correct"] for trial in found)


def test_a_slow_wire_is_measured_and_marked_and_the_others_are_not(cluster: Get) -> None:
    """What rank 3 sends is under way for 60 ms, at 10 bytes a microsecond; the others' for 5, at
    100."""
    found = cluster(4).values("trials.trials", paced_rank=3, pace=(60_000, 10))[0]
    assert [trial["is_slow"] for trial in found] == [False, False, True]
    slow = found[2]
    assert slow["latency_us"] > 30_000, "half of a round, of which one way is slow"
    assert slow["up"] < 10 < slow["down"] < 100, "only the lane to the lower rank is as slow"


def test_a_wrong_bit_is_found(cluster: Get) -> None:
    found = cluster(3).values("trials.trials", wrong_rank=2)[0]
    assert [trial["is_correct"] for trial in found] == [True, False]
