"""Tied parameters: one value on all ranks, and one gradient, that of the unsplit model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster
from jobs.tied import WRONG

from npu_pipe import NpuPipeError, Tied

Get = Callable[[int], Cluster]

pytestmark = pytest.mark.timeout(60)

SCHEDULES = [
    ("1f1b", None),
    ("interleaved-1f1b", 2),
    ("zb-h1", None),
    ("zb-v", None),
    ("dualpipe", None),
    ("chimera", None),
]


@pytest.mark.parametrize("shared", [False, True], ids=["copies", "shared where they can be"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_tied_copies_train_as_the_unsplit_model_and_stay_equal(
    cluster: Get, name: str, chunks: int | None, ranks: int, shared: bool
) -> None:
    """Of steps, windows and accumulated steps, with clipping and three updates by AdamW."""
    answers = cluster(ranks).values(
        "tied.trains_as_unsplit", name=name, chunks=chunks, microbatches=2 * ranks, shared=shared
    )
    for row in zip(*answers, strict=True):  # of gradients, then of values, after each update
        hashes = {each for rank in row for each in rank}
        assert len(hashes) == 2, "each tied parameter is the same everywhere, bit by bit"


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_tied_gradient_is_the_sum_in_the_order_of_stages(cluster: Get, name: str) -> None:
    cluster(2).values("tied.expected_sums", name=name, microbatches=4)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_a_parameter_that_no_copy_was_used_of_has_no_gradient(cluster: Get, name: str) -> None:
    """Zeros would have an optimizer decay it, as it does not in the unsplit model."""
    for some, none in cluster(2).values("tied.unused", name=name):
        assert some == pytest.approx([1 / 3] * 3)
        assert none is None


def test_copies_that_are_all_frozen_stay_so(cluster: Get) -> None:
    assert cluster(2).values("tied.frozen", everywhere=True) == [[False], [False]]


def test_a_copy_that_is_frozen_alone_later_is_told_on_every_rank(cluster: Get) -> None:
    for answer in cluster(2).run("tied.frozen", everywhere=False):
        assert answer.error == "HandshakeError"
        assert "0:embedding.weight = 1:head.weight" in answer.text
        assert "True on rank 0, but False on rank 1" in answer.text


TOLD = {
    "no such stage": "'gain' is said to lie in stage 7",
    "no such parameter": "rank 1: stage 1 has no parameter 'gains'; it has gain, linear.weight",
    "other shape": "gain of stage 0 on rank 0: (6,) of torch.float64, trained, "
    "linear.weight of stage 1 on rank 1: (6, 6)",
    "other dtype": "gain of stage 1 on rank 1: (6,) of torch.float32",
    "frozen here": "gain of stage 1 on rank 1: (6,) of torch.float64, frozen",
    "only here": "on rank 0, but [] on rank 1",
    "twice": "'gain' of stage 1 is named 2 times",
    "one object in two": "rank 0: 'linear.bias' of stage 0 is the same as 0:gain",
}


@pytest.mark.parametrize("what", TOLD)
def test_ties_that_cannot_be_are_refused_alike(cluster: Get, what: str) -> None:
    assert set(WRONG) < set(TOLD)
    for answer in cluster(2).run("tied.refused", what=what):
        assert answer.error == ("HandshakeError" if what == "only here" else "ConfigError")
        assert TOLD[what] in answer.text


def test_replicas_that_share_differently_are_refused(cluster: Get) -> None:
    for answer in cluster(2).run("tied.replicas_differ"):
        assert answer.error == "HandshakeError"
        assert "'head.weight' of stage 1 is the same as another copy on one rank only" in (
            answer.text
        )


def test_a_tie_is_two_copies_or_more() -> None:
    assert Tied((3, "b"), (0, "a")).copies == ((0, "a"), (3, "b"))
    for wrong in ((), ((0, "a"),), ((0, "a"), (0, "a")), ("a", "b"), ((0, "a"), (1, 2))):
        with pytest.raises(NpuPipeError, match="tied parameter"):
            Tied(*wrong)
