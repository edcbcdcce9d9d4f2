"""Every schedule trains on device npu with backend hccl, and gives the gradients of the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster
from test_any_schedule import sizes_of

from npu_pipe.schedules.registry import FAMILIES


@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_schedule_gives_the_gradients_of_the_cpu(
    npus: Callable[..., Cluster], name: str, ranks: int
) -> None:
    """With rendezvous sends, which hang where an order is wrong, and free buffers full of NaN."""
    microbatches = sizes_of(name, ranks)[-1]
    cluster = npus(ranks, link_latency_us=200)
    for answer in cluster.values("training.equals_cpu", name=name, microbatches=microbatches):
        assert answer["link"] == "DeviceLink"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_tied_copies_and_the_norm_of_all_gradients_are_those_of_the_cpu(
    npus: Callable[..., Cluster], name: str
) -> None:
    npus(2, link_latency_us=200).values("training.tied_equals_cpu", name=name, microbatches=8)


@pytest.mark.timeout(120)
def test_one_rank_needs_no_lanes(npus: Callable[..., Cluster]) -> None:
    (answer,) = npus(1).values("training.equals_cpu", name="gpipe", microbatches=4)
    assert answer["link"] == "DeviceLink"


@pytest.mark.timeout(120)
def test_ranks_that_share_an_npu_send_through_the_host(npus: Callable[..., Cluster]) -> None:
    arguments = {"name": "zb-v", "microbatches": 4, "shared": True}
    for answer in npus(2, link_latency_us=200).values("training.equals_cpu", **arguments):
        assert answer["link"] == "StagedLink"
