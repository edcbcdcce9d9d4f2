"""The NVIDIA tier: pytest -m cuda. Several ranks may share a GPU, through the host's memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cluster import Cluster
from test_any_schedule import sizes_of

from npu_pipe import build_schedule
from npu_pipe.schedules.registry import FAMILIES

RANKS = 2
GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.timeout(120),
    pytest.mark.skipif(GPUS == 0, reason="there is no CUDA device"),
]


@pytest.mark.skipif(GPUS < RANKS, reason="NCCL needs a GPU for each rank")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_schedule_gives_the_gradients_of_the_cpu_over_nccl(
    cluster: Callable[[int], Cluster], name: str
) -> None:
    arguments = {"kind": "cuda", "name": name, "microbatches": sizes_of(name, RANKS)[-1]}
    for answer in cluster(RANKS).values("on_device.equals_cpu", **arguments):
        assert answer["link"] == "DeviceLink"


@pytest.mark.parametrize(
    "name", [n for n in FAMILIES if not build_schedule(n, ranks=2, microbatches=8).mirrored]
)
def test_every_schedule_gives_the_gradients_of_the_cpu_on_one_gpu(
    cluster: Callable[[int], Cluster], name: str
) -> None:
    arguments = {"name": name, "microbatches": sizes_of(name, RANKS)[-1], "shared": True}
    for answer in cluster(RANKS).values("on_device.equals_cpu", kind="cuda", **arguments):
        assert answer["link"] == "StagedLink"


def test_one_rank_on_a_gpu_needs_no_lanes(cluster: Callable[[int], Cluster]) -> None:
    arguments = {"kind": "cuda", "name": "gpipe", "microbatches": 4}
    (answer,) = cluster(1).values("on_device.equals_cpu", **arguments)
    assert answer["link"] == "DeviceLink"
