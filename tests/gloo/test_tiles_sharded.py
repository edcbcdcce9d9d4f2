"""Boundaries in tiles between stages that are cut over ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster

Get = Callable[[int], Cluster]

pytestmark = pytest.mark.timeout(150)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_the_gradients_are_the_unsplit_ones(cluster: Get, name: str) -> None:
    cluster(4).values("tiles_sharded.trains", name=name, timeout_s=100)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_between_two_tiles_is_named_on_all_pipelines(
    cluster: Get, rank: int, tmp_path: Path
) -> None:
    """The next rank waits for its tiles, the one beside it for its rows."""
    answers = cluster(4).survivors(
        "tiles_sharded.killed", dead=rank, rank=rank, note=str(tmp_path / "moment"), timeout_s=100
    )
    for answer in answers:
        assert answer.error is None, answer.trace
        assert answer.value["text"].startswith("PeerError: every rank stays alive")
        assert f"rank {rank} was killed" in answer.value["text"]
        assert "in 0F" in answer.value["text"]
        assert answer.value["seconds"] < 10


def test_fifty_steps_hold_no_more_than_twelve(cluster: Get) -> None:
    """Of several lengths. One value of each microbatch that was kept would be 40 MB by then."""
    rows, steps = [4096, 3072, 5120], [10, 11, 12, 48, 49, 50]
    for held in cluster(4).values("tiles_sharded.holds", rows=rows, steps=steps, timeout_s=120):
        for what, more in (("tensors", 0), ("buffers", 4), ("bytes", 16 << 20)):
            early, late = (max(each[what] for each in half) for half in (held[:3], held[3:]))
            assert late <= early + more, (what, held)
