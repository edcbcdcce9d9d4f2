"""What users of torch.distributed.pipelining ran into, with npu_pipe.torch_api in its place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster

Get = Callable[[int], Cluster]

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_fewer_microbatches_than_ranks(cluster: Get, microbatches: int) -> None:
    cluster(4).values("torch_api_cases.few_microbatches", microbatches=microbatches)


@pytest.mark.parametrize(
    ("cls", "chunks"),
    [
        ("Schedule1F1B", 1),
        ("ScheduleGPipe", 1),
        ("ScheduleInterleaved1F1B", 2),
        ("ScheduleZBVZeroBubble", 2),
        ("ScheduleDualPipeV", 2),
    ],
)
def test_ten_rows_in_four_microbatches(cluster: Get, cls: str, chunks: int) -> None:
    shapes = cluster(2).values("torch_api_cases.uneven_rows", cls=cls, chunks=chunks)
    assert sorted(shapes) == [[], [10, 6]]


@pytest.mark.parametrize(
    ("cls", "chunks"),
    [("Schedule1F1B", 1), ("ScheduleInterleaved1F1B", 1), ("ScheduleZBVZeroBubble", 2)],
)
def test_a_pipeline_of_one_rank(cluster: Get, cls: str, chunks: int) -> None:
    assert cluster(1).values("torch_api_cases.uneven_rows", cls=cls, chunks=chunks) == [[10, 6]]


@pytest.mark.parametrize("cls", ["Schedule1F1B", "ScheduleZBVZeroBubble"])
@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]])
def test_two_pipelines_beside_each_other(cluster: Get, cls: str, groups: list[list[int]]) -> None:
    cluster(4).values("torch_api_cases.replicas", cls=cls, groups=groups)


def test_a_batch_norm_counts_each_microbatch_once(cluster: Get) -> None:
    assert cluster(2).values("torch_api_cases.batches_counted") == [4, 4]


def test_an_evaluation_returns_the_rows_it_was_given(cluster: Get) -> None:
    assert cluster(2).values("torch_api_cases.sizes_of_evaluations") == [[], [8, 4, 9]]


def test_a_reused_output_buffer_does_not_make_all_losses_the_last(cluster: Get) -> None:
    losses = cluster(2).values("torch_api_cases.reused_buffer")
    assert len(set(losses[1])) == 4


@pytest.mark.parametrize("scale_grads", [True, False])
@pytest.mark.parametrize("cls", ["ScheduleGPipe", "Schedule1F1B"])
def test_two_steps_before_one_update_scale_once(cluster: Get, cls: str, scale_grads: bool) -> None:
    cluster(2).values("torch_api_cases.two_steps_one_update", cls=cls, scale_grads=scale_grads)


def test_outputs_and_losses_hold_no_graph(cluster: Get) -> None:
    assert cluster(2).values("torch_api_cases.graphs_end") == [[], [False] * 5]


def test_ids_masks_constants_and_objects(cluster: Get) -> None:
    cluster(2).values("torch_api_cases.other_values")


def test_lengths_change_from_step_to_step(cluster: Get) -> None:
    cluster(4).values("torch_api_cases.lengths_change")


def test_a_dict_as_target_and_as_output(cluster: Get) -> None:
    assert cluster(2).values("torch_api_cases.dicts") == [[], ["double", "logits"]]


def test_stages_work_in_place(cluster: Get) -> None:
    cluster(2).values("torch_api_cases.in_place")


@pytest.mark.parametrize("cls", ["ScheduleGPipe", "Schedule1F1B"])
def test_microbatches_that_are_cut_already(cluster: Get, cls: str) -> None:
    cluster(2).values("torch_api_cases.cut_already", cls=cls)
