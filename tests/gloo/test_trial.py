"""The trial of transfers between neighbours: right bytes, plausible numbers, slow links found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from cluster import Cluster

from npu_pipe.comm.trial import Trial, better

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


def test_what_it_takes_to_look_at_the_bytes_is_not_taken_for_the_link(cluster: Get) -> None:
    """0.3 s a look: with one of them, 3 x 256 KiB would be under 3 bytes a microsecond."""
    (found,) = cluster(2).values("trials.trials", looks_s=0.3)[0]
    assert found["is_correct"]
    assert found["latency_us"] < 0.3e6 / 20, "of 10 rounds"
    assert min(found[way] for way in ("down", "up", "both")) > 3 * 2**18 / 0.3e6


def test_of_a_pair_that_was_tried_twice_the_best_counts() -> None:
    """A host that is busy for a moment makes a link look slow; wrong bytes stay wrong."""
    once = Trial(0, 1, 50.0, 9.0, 1.0, 5.0, is_correct=True, is_near=True)
    other = replace(once, low=1, high=2)
    again = replace(once, latency_us=90.0, up=8.0)
    assert better([once, other], [again]) == (replace(once, up=8.0), other)
    assert not better([once], [replace(again, is_correct=False)])[0].is_correct
    assert not better([replace(once, is_correct=False)], [again])[0].is_correct


def test_a_wrong_bit_is_found(cluster: Get) -> None:
    found = cluster(3).values("trials.trials", wrong_rank=2)[0]
    assert [trial["is_correct"] for trial in found] == [True, False]
