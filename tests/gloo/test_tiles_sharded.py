"""Boundaries in tiles between stages that are cut over ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster

Get = Callable[[int], Cluster]

pytestmark = pytest.mark.timeout(250)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_the_gradients_are_the_unsplit_ones(cluster: Get, name: str) -> None:
    cluster(4).values("tiles_sharded.trains", name=name, timeout_s=150)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_between_two_tiles_is_named_on_all_pipelines(
    cluster: Get, rank: int, tmp_path: Path
) -> None:
    """The next rank waits for its tiles, the one beside it for its rows."""
    answers = cluster(4).survivors(
        "tiles_sharded.killed", dead=rank, rank=rank, note=str(tmp_path / "moment"), timeout_s=150
    )
    for answer in answers:
        assert answer.error is None, answer.trace
        assert answer.value["text"].startswith("PeerError: every rank stays alive")
        assert f"rank {rank} was killed" in answer.value["text"]
        assert "in 0F" in answer.value["text"]
        assert answer.value["seconds"] < 10


@pytest.mark.timeout(250)
def test_a_hundred_steps_hold_no_more_than_fifty(cluster: Get) -> None:
    """One value of each microbatch that were kept would be 200 tensors and 52 MB more. Slots of
    shared memory keep views of what has lain in them, until each has been used."""
    for early, late in cluster(4).values(
        "tiles_sharded.holds", rows=4096, steps=[50, 100], timeout_s=200
    ):
        assert late["tensors"] < early["tensors"] + 150
        assert late["bytes"] < early["bytes"] + (32 << 20)
