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
