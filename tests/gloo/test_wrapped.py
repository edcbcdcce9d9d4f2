"""Stages wrapped by torch's own data parallelism: DistributedDataParallel and fully_shard."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster

Ranks = Callable[[int], Cluster]

pytestmark = pytest.mark.timeout(180)  # fully_shard takes long to import on a busy machine


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize("wrap", ["ddp", "inside", "fsdp"])
def test_wrapped_stages_give_the_gradients_of_the_unsplit_model(
    cluster: Ranks, wrap: str, name: str
) -> None:
    """DistributedDataParallel expects a backward after each forward: with several microbatches
    under way a part of the gradients was not averaged, and nothing was said."""
    for found in cluster(4).values("wrapped.differences", wrap=wrap, name=name):
        assert max(found) < 1e-12


def test_gradients_of_earlier_steps_are_averaged_once(cluster: Ranks) -> None:
    for found in cluster(4).values("wrapped.accumulated"):
        assert max(found) < 1e-14


def test_a_parameter_that_no_replica_used_has_no_gradient(cluster: Ranks) -> None:
    answers = cluster(4).values("wrapped.unused")
    assert all(unused for unused, _ in answers)
    # both replicas of a stage have the mean of one gradient and of none
    used = [gradient for _, gradient in answers]
    assert used[0] == used[2] != 0.0
    assert used[1] == used[3] != 0.0


@pytest.mark.parametrize("through", ["ddp", "replicas", "tied"])
def test_gradients_in_float32_of_weights_in_bfloat16_are_summed(
    cluster: Ranks, through: str
) -> None:
    """A rank without one made zeros in bfloat16, which the parameter refuses; and tied copies
    were received into half of the memory."""
    mean = 2.0 if through == "ddp" else 1.0
    for always, sometimes in cluster(2).values("wrapped.in_float32", through=through):
        assert always == ["torch.float32", *[8 / mean] * 3]
        assert sometimes == ["torch.float32", *[4 / mean] * 3]


def test_gradients_in_main_grad_are_not_summed_and_that_is_said(cluster: Ranks) -> None:
    for answer in cluster(4).run("wrapped.kept_elsewhere"):
        assert answer.error == "ConfigError"
        assert "module.0.weight of stage" in answer.text
        assert "has a main_grad; set its grad_dtype to torch.float32" in answer.text


@pytest.mark.parametrize(
    ("wrap", "what"), [("static", "static_graph=True"), ("hooked", "a communication hook")]
)
def test_what_would_be_ignored_is_refused(cluster: Ranks, wrap: str, what: str) -> None:
    for answer in cluster(4).run("wrapped.refused", wrap=wrap):
        assert answer.error == "ConfigError"
        assert f"rank 1: a stage is wrapped with {what}" in answer.text


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_sharded_stage_is_reduced_once_a_step(cluster: Ranks, name: str) -> None:
    """It was after each of the microbatches."""
    assert cluster(4).values("wrapped.reductions", name=name) == [1] * 4


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_clipping_takes_the_norm_of_the_whole_model(cluster: Ranks, wrap: str) -> None:
    for found, after, norm in cluster(4).values("wrapped.clipped", wrap=wrap):
        assert found == pytest.approx(norm)
        assert after == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_wrapped_stages_of_torch_pipelining_give_the_same_here(cluster: Ranks, wrap: str) -> None:
    for found in cluster(4).values("wrapped.like_torch", wrap=wrap, microbatches=4):
        assert max(found) < 1e-14
