"""npu_pipe.torch_api against torch.distributed.pipelining: one process group, the same modules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster

Get = Callable[[int], Cluster]

pytestmark = pytest.mark.timeout(120)

CLASSES = [
    ("ScheduleGPipe", 2, 4, 1),
    ("ScheduleGPipe", 4, 3, 1),
    ("Schedule1F1B", 2, 4, 1),
    ("Schedule1F1B", 4, 8, 1),
    ("ScheduleInterleaved1F1B", 2, 4, 2),
    ("ScheduleInterleaved1F1B", 2, 4, 3),
    ("ScheduleInterleaved1F1B", 4, 8, 2),
    ("ScheduleLoopedBFS", 2, 4, 2),
    ("ScheduleLoopedBFS", 4, 4, 2),
    ("ScheduleInterleavedZeroBubble", 2, 4, 2),
    ("ScheduleInterleavedZeroBubble", 4, 8, 2),
    ("ScheduleZBVZeroBubble", 2, 4, 2),
    ("ScheduleZBVZeroBubble", 4, 8, 2),
    ("ScheduleDualPipeV", 2, 4, 2),
    ("ScheduleDualPipeV", 4, 8, 2),
]


@pytest.mark.parametrize("scale_grads", [True, False])
@pytest.mark.parametrize(("cls", "ranks", "microbatches", "chunks"), CLASSES)
def test_each_class_gives_torchs_outputs_losses_and_gradients(
    cluster: Get, cls: str, ranks: int, microbatches: int, chunks: int, scale_grads: bool
) -> None:
    compared = cluster(ranks).values(
        "torch_api.every_class",
        cls=cls,
        microbatches=microbatches,
        chunks=chunks,
        scale_grads=scale_grads,
    )
    assert compared == [2 * chunks] * ranks


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("cls", ["ScheduleGPipe", "Schedule1F1B"])
def test_arguments_and_keywords_are_cut_as_torch_cuts_them(
    cluster: Get, cls: str, cut: bool
) -> None:
    assert cluster(2).values("torch_api.chunk_specs", cls=cls, cut=cut) == [2, 2]


def test_outputs_are_merged_as_the_spec_says(cluster: Get) -> None:
    assert cluster(2).values("torch_api.merge_specs") == [2, 2]


def test_keywords_of_the_loss_are_those_of_the_call(cluster: Get) -> None:
    assert cluster(2).values("torch_api.loss_keywords") == [2, 2]


def test_without_a_loss_a_step_gives_outputs_only(cluster: Get) -> None:
    assert cluster(2).values("torch_api.without_a_loss") == [None, None]
