"""What is held at once is what was predicted, and does not grow with the microbatches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster

Get = Callable[[int], Cluster]
pytestmark = pytest.mark.timeout(120)

BOUNDED = ["1f1b", "zb-h1", "zb-v", "v-half", "v-min", "interleaved-1f1b", "dualpipe-v"]


@pytest.mark.parametrize("name", [*BOUNDED, "gpipe", "dualpipe"])
def test_as_many_outputs_live_as_predicted(cluster: Get, name: str) -> None:
    """A sent output is copied, and an activation goes with its backward or its W."""
    found = cluster(4).values("held.peak", name=name, microbatches=16, link="fastest_link")
    for rank in found:
        assert rank["alive"] == rank["measured"] == rank["predicted"]
        assert rank["left"] == 0


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_over_gloo_a_few_more_live_until_they_are_sent(cluster: Get, name: str) -> None:
    for rank in cluster(4).values("held.peak", name=name, microbatches=16, link="gloo_link"):
        assert rank["predicted"] <= rank["alive"] <= rank["predicted"] + 4


@pytest.mark.parametrize("name", BOUNDED)
def test_it_does_not_grow_with_the_number_of_microbatches(cluster: Get, name: str) -> None:
    few, many = (
        cluster(4).values("held.peak", name=name, microbatches=m, link="fastest_link")
        for m in (16, 64)
    )
    assert few == many
