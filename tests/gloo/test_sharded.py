"""A model cut over tensors and stages trains as the unsplit one, also with W apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster
from test_fused import PROVIDERS

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize("keep", ["GATHERED", "OWN_ROWS"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_zb_v_on_two_by_two_ranks_gives_the_unsplit_gradients(
    cluster: Callable[[int], Cluster], provider: str, keep: str
) -> None:
    arguments = {"provider": provider, "keep": keep}
    for answer in cluster(4).values("sharded.trains", **arguments, timeout_s=150):
        assert {row[1] for row in answer["rows"]} == {provider}


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe-v"])
def test_other_schedules_do_too(cluster: Callable[[int], Cluster], name: str) -> None:
    cluster(4).values("sharded.trains", name=name, timeout_s=150)


def test_with_the_whole_sequence_on_each_rank_too(cluster: Callable[[int], Cluster]) -> None:
    """Also one that the ranks could not share, which the embedding refused."""
    for length in (6, 5):
        cluster(4).values("sharded.trains", sequence="WHOLE", length=length, timeout_s=150)


@pytest.mark.parametrize("sequence", ["SHARDED", "WHOLE"])
def test_under_activation_checkpointing_too(
    cluster: Callable[[int], Cluster], sequence: str
) -> None:
    """The forward runs again in I, with its transfers, and W waits as ever."""
    cluster(4).values("sharded.trains", sequence=sequence, checkpointed=True, timeout_s=150)


def test_on_four_tensor_ranks_too(cluster: Callable[[int], Cluster]) -> None:
    cluster(4).values("sharded.trains", name="zb-v", tp=4, length=8, timeout_s=150)


def test_in_bfloat16_within_its_rounding(cluster: Callable[[int], Cluster]) -> None:
    """Against float64 of the same weights: 8 bits, through five layers and back."""
    cluster(4).values("sharded.trains", dtype="bfloat16", limit=0.06, timeout_s=150)


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_weights_of_a_block_wait_for_w(cluster: Callable[[int], Cluster], ranks: int) -> None:
    """Two norms and four linear layers; with own rows kept, W holds less."""
    kept = cluster(ranks).values("sharded.halves", keep="GATHERED", timeout_s=150)
    own = cluster(ranks).values("sharded.halves", keep="OWN_ROWS", timeout_s=150)
    for answer in (*kept, *own):
        assert answer["before"] == []
        assert (answer["put_off"], answer["after"]) == (6, 6)
    assert own[0]["bytes"] < kept[0]["bytes"]


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_fails_ends_the_pipelines_on_all_sides_of_it(
    cluster: Callable[[int], Cluster], rank: int
) -> None:
    """Its own by the watch, the other by the tensor ranks' connection, in seconds."""
    answers = cluster(4).values("sharded.one_fails", rank=rank, timeout_s=150)
    kinds = [answer["kind"] for answer in answers]
    assert kinds.pop(rank) == "ValueError"
    assert kinds == ["PeerError"] * 3, answers
    assert "the stage is broken" in answers[(rank + 2) % 4]["text"]
    assert max(answer["seconds"] for answer in answers) < 30
