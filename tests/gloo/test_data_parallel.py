"""Replicas of a pipeline give the gradients of the unsplit model, and end together."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from cluster import Cluster

from npu_pipe.launch.mesh import Axis, Mesh

Ranks = Callable[[int], Cluster]

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize("loss", ["mean", "tokens", "sum"])
@pytest.mark.parametrize(
    ("name", "dp", "shares"),
    [
        ("1f1b", 2, [6, 6]),
        ("1f1b", 2, [8, 4]),
        ("zb-v", 2, [6, 6]),
        ("dualpipe", 2, [8, 4]),
        ("1f1b", 4, [4, 2, 4, 2]),
    ],
)
def test_replicas_equal_the_unsplit_model(
    cluster: Ranks, name: str, dp: int, shares: list[int], loss: str
) -> None:
    answers = cluster(4).values(
        "replicas.equal_the_unsplit_model", name=name, dp=dp, shares=shares, loss=loss
    )
    assert {answer["loss"] for answer in answers} == {answers[0]["loss"]}
    places = {tuple(answer["at"]) for answer in answers}
    assert places == {(s, d) for s in range(4 // dp) for d in range(dp)}


def test_replicas_equal_one_pipeline_of_as_many_stages(cluster: Ranks) -> None:
    """The unsplit model, pp 2 alone, and dp 2 x pp 2: one loss."""
    job = {"name": "1f1b", "loss": "tokens", "windows": 2}
    many = cluster(4).values("replicas.equal_the_unsplit_model", dp=2, shares=[8, 4], **job)
    alone = cluster(2).values("replicas.equal_the_unsplit_model", dp=1, shares=[12], **job)
    for ours in many:
        theirs = alone[ours["at"][0]]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-13)
        assert ours["bits"] == pytest.approx(theirs["bits"], rel=1e-12)


def test_all_replicas_begin_with_the_parameters_and_buffers_of_the_first(cluster: Ranks) -> None:
    assert cluster(2).values("replicas.first_parameters_are_shared") == [[0, 0]] * 2


def test_a_gradient_that_one_replica_has_is_the_sum_and_none_stays_none(cluster: Ranks) -> None:
    for found in cluster(2).values("replicas.frozen_and_unused"):
        assert found == {"used": [3] * 3, "once": [5] * 3, "never": None, "frozen": None}


def test_a_parameter_of_two_stages_is_added_once(cluster: Ranks) -> None:
    assert cluster(2).values("replicas.shared_by_two_stages") == [[2] * 4] * 2


def test_tied_copies_stay_equal_bit_by_bit(cluster: Ranks) -> None:
    found = cluster(6).values("replicas.tied_copies_stay_equal", dp=3)
    assert found[0]
    assert found == [found[0]] * 6


def test_replicas_with_other_modules_are_told_so(cluster: Ranks) -> None:
    for answer in cluster(2).run("replicas.differing_modules"):
        assert answer.error == "HandshakeError"
        assert "(3, 3) torch.float32 on rank 0, but (4, 3) torch.float32 on rank 1" in answer.text


def test_a_loss_that_does_not_tell_its_counts_is_refused(cluster: Ranks) -> None:
    for answer in cluster(2).run("replicas.own_loss"):
        assert answer.error == "ConfigError"
        assert "OwnLoss has no methods counts and shares" in answer.text


def test_a_replica_without_valid_tokens_counts_nothing_unless_all_are(cluster: Ranks) -> None:
    losses = cluster(2).values("replicas.nothing_valid", where=[1])
    assert losses[0] == losses[1] > 0
    for answer in cluster(2).run("replicas.nothing_valid", where=[0, 1]):
        assert answer.error == "DataError"
        assert "the number of valid tokens in this step is 0" in answer.text


@pytest.mark.parametrize("at", ["step", "sum"])
@pytest.mark.parametrize("dead", [0, 3])
def test_when_a_rank_is_killed_all_ranks_of_all_replicas_leave_within_seconds(
    cluster: Ranks, dead: int, at: str
) -> None:
    ranks = cluster(4)
    ranks.values("replicas.first_parameters_are_shared")  # all have imported what it takes
    begun_s = time.monotonic()
    answers = ranks.survivors("replicas.one_is_killed", dead=dead, victim=dead, at=at, timeout_s=30)
    assert time.monotonic() - begun_s < 20, "to connect, three updates, and to leave"
    assert [answer.error for answer in answers] == ["PeerError"] * 3
    mesh = Mesh(dp=2, pp=2)
    survivors = [rank for rank in range(4) if rank != dead]
    same = mesh.ranks(Axis.PP, dead)
    told = next(a.text for r, a in zip(survivors, answers, strict=True) if r in same)
    ranks = ", ".join(map(str, same))
    words = f"among ranks {ranks} of the job, counted from 0: rank {mesh.coordinates(dead).pp} "
    assert words in told


def test_a_replica_in_the_middle_of_a_long_step_leaves_too(cluster: Ranks) -> None:
    """The step would take 12 s; a rank that computes notices at the end of what it computes."""
    ranks = cluster(4)
    ranks.values("replicas.first_parameters_are_shared")
    job = "replicas.one_is_killed_while_another_replica_computes"
    answers = ranks.survivors(job, dead=1, victim=1, timeout_s=40)
    assert [answer.error for answer in answers] == [None] * 3, answers
    assert all(answer.value < 7 for answer in answers), answers


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (1, 4), (4, 1), (1, 2)])
def test_the_groups_along_the_axes_are_those_of_the_mesh(cluster: Ranks, dp: int, tp: int) -> None:
    mesh = Mesh(dp=dp, pp=4 // dp // tp, tp=tp)
    for rank, found in enumerate(cluster(4).values("replicas.axes", dp=dp, tp=tp)):
        wanted = {a.value: sum(mesh.ranks(a, rank)) for a in Axis if mesh.size_along(a) > 1}
        assert found == wanted
