"""What is wrong in a script for torch is refused on every rank, with a word on what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster

Get = Callable[[int], Cluster]

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("kind", "rank", "text"),
    [
        ("no target", 1, "there is no target"),
        ("no inputs", 0, "it was called without any"),
        ("losses are a tuple", 0, "it is a tuple"),
        ("fewer rows than microbatches", 0, "3 rows for 4 microbatches"),
        ("fewer targets than microbatches", 1, "3 rows for 4 microbatches"),
        ("a scalar", 0, "a dimension that they have"),
        ("too few arg_mbs", 0, "arg_mbs were given"),
        ("whole and cut", 0, "keyword arguments and kwarg_mbs were given"),
        ("gradients are disabled", 0, "call eval"),
        ("eval: losses without target", 1, "there is no target"),
    ],
)
def test_a_bad_call_is_refused_everywhere_and_the_next_one_runs(
    cluster: Get, kind: str, rank: int, text: str
) -> None:
    texts = cluster(2).values("torch_api_faults.bad_call", kind=kind)
    assert texts[0] == texts[1]
    assert text in texts[0]
    assert f"rank {rank}: " in texts[0]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_after_an_exception_in_a_stage_the_schedule_runs_again(cluster: Get, rank: int) -> None:
    texts = cluster(3).values("torch_api_faults.stage_raises", rank=rank)
    for each, text in enumerate(texts):
        assert text.startswith("KeyError" if each == rank else "PeerError")
        assert "the third forward is broken" in text
        assert each == rank or f"rank {rank}" in text


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("reversed", "rank 0: it was given stages [1], and holds [0]"),
        ("a loop for a V", "rank 0: it was given stages [0, 2], and holds [0, 3]"),
    ],
)
def test_a_wrong_placement_is_told_on_every_rank(cluster: Get, kind: str, facts: str) -> None:
    texts = cluster(2).values("torch_api_faults.wrong_placement", kind=kind)
    assert texts[0] == texts[1]
    assert facts in texts[0]


@pytest.mark.parametrize("what", ["loss", "number of microbatches"])
def test_ranks_that_differ_are_named(cluster: Get, what: str) -> None:
    for text in cluster(2).values("torch_api_faults.ranks_differ", what=what):
        assert text.startswith(f"HandshakeError: all ranks have the same {what}")
        assert "on rank 1" in text


def test_a_loss_that_is_no_scalar_is_refused_everywhere(cluster: Get) -> None:
    for text in cluster(2).values("torch_api_faults.odd_loss"):
        assert "what a loss function gives is a scalar tensor" in text


REFUSED = {
    "too early": "call torch.distributed.init_process_group first",
    "the stage's index": "stage_index is 2, num_stages 2",
    "not a module": "give an nn.Module",
    "a device": "one is on meta; move it there",
    "dw_builder": "leave dw_builder out",
    "others' group": "was given a group of [",
    "data parallelism": "a stage is wrapped with static_graph=True",
    "number of stages": "1 of 4 stages were given on each of 2 ranks",
    "a list for one": "a schedule runs stages of npu_pipe.torch_api",
    "one for a list": "a schedule runs stages of npu_pipe.torch_api",
    "torch's stage": "build them with npu_pipe.torch_api.PipelineStage",
    "three in a V": "zb-v places 2 stages on each rank; 3 were asked for",
    "few microbatches": "dualpipe-v",
    "no microbatches": "microbatches is a whole number of at least 1",
    "twins": "their indices are",
    "no stages": "a schedule runs stages of npu_pipe.torch_api",
}


def test_what_cannot_be_built_is_refused_before_anything_is_sent(cluster: Get) -> None:
    for found in cluster(2).values("torch_api_faults.construction"):
        assert found.pop("all of the ranks") == "not refused"
        assert found.keys() == REFUSED.keys()
        for what, text in REFUSED.items():
            assert text in found[what], what


def test_a_rank_that_does_not_come_is_named_after_the_scripts_own_timeout(cluster: Get) -> None:
    for text in cluster(2).values("torch_api_faults.stalls"):
        assert text.startswith("PeerError: no rank is without progress for 5 s")
        assert "rank 1 has not called" in text


def test_the_failure_of_one_pipeline_does_not_end_another(cluster: Get) -> None:
    texts = cluster(4).values("torch_api_faults.one_of_two_pipelines_fails")
    assert texts[0].startswith("PeerError")
    assert texts[1].startswith("KeyError")
    assert texts[2:] == ["nothing was raised"] * 2


def test_schedules_may_be_made_at_another_time_on_each_rank(cluster: Get) -> None:
    cluster(2).values("torch_api_faults.made_in_any_order")
