"""Boundaries in tiles between NPUs, each part a send of HCCL that waits for its receive."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster
from test_any_schedule import sizes_of


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "ranks"), [("1f1b", 2), ("zb-v", 2), ("interleaved-zb", 4), ("dualpipe", 4)]
)
def test_gradients_are_those_of_the_cpu(
    npus: Callable[..., Cluster], name: str, ranks: int
) -> None:
    microbatches = sizes_of(name, ranks)[-1]
    arguments = {"name": name, "microbatches": microbatches, "tiles": 3}
    answers = npus(ranks).values("tiles.equals_cpu", **arguments)
    for answer in answers:
        assert (answer["link"], answer["inner"]) == ("TiledLink", "DeviceLink")
    # Not on each rank: the products are small, and the thread of a stream may be slow to send.
    assert any(answer["early"] > 0 for answer in answers), (
        "a part is sent while the stream that computes goes on"
    )
