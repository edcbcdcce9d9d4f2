"""Boundaries in tiles between GPUs: pytest -m cuda."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cluster import Cluster

GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.timeout(120),
    pytest.mark.skipif(GPUS == 0, reason="there is no CUDA device"),
]


@pytest.mark.skipif(GPUS < 2, reason="NCCL needs a GPU for each rank")
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_gradients_are_those_of_the_cpu_over_nccl(
    cluster: Callable[[int], Cluster], name: str
) -> None:
    arguments = {"kind": "cuda", "name": name, "microbatches": 4, "tiles": 3}
    for answer in cluster(2).values("tiles_on_device.equals_cpu", **arguments):
        assert (answer["link"], answer["inner"]) == ("TiledLink", "DeviceLink")
        assert answer["early"] > 0


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_gradients_are_those_of_the_cpu_on_one_gpu(
    cluster: Callable[[int], Cluster], name: str
) -> None:
    arguments = {"name": name, "microbatches": 4, "tiles": 3, "shared": True}
    for answer in cluster(2).values("tiles_on_device.equals_cpu", kind="cuda", **arguments):
        assert (answer["link"], answer["inner"]) == ("TiledLink", "StagedLink")
