"""Gradients of what a script gives whole, and losses of any form, as torch has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster

Get = Callable[[int], Cluster]
pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("cls", "chunks"),
    [
        ("ScheduleGPipe", 1),
        ("Schedule1F1B", 1),
        ("ScheduleInterleavedZeroBubble", 2),
        ("ScheduleDualPipeV", 2),
    ],
)
def test_inputs_targets_and_keywords_that_require_gradients_get_those_of_the_mean(
    cluster: Get, cls: str, chunks: int
) -> None:
    """They were dropped without a word."""
    cluster(2).values("torch_api_values.given_gradients", cls=cls, chunks=chunks, rows=8)


def test_a_batch_of_unequal_microbatches_gets_its_gradients(cluster: Get) -> None:
    cluster(2).values("torch_api_values.given_gradients", cls="Schedule1F1B", chunks=1, rows=10)


def test_what_makes_the_batch_is_trained_too(cluster: Get) -> None:
    """Its parameters got no gradient, without a word; torch fails in the second microbatch."""
    cluster(2).values("torch_api_values.graph_before")


def test_an_evaluation_gives_a_batch_no_gradient(cluster: Get) -> None:
    assert cluster(2).values("torch_api_values.evaluation_gives_none") == [False, False]


@pytest.mark.parametrize("shape", [[1], [1, 1]])
def test_a_loss_of_one_element_is_one_in_any_shape(cluster: Get, shape: list[int]) -> None:
    """It was refused; autograd takes it, and the list has it in its own shape."""
    found = cluster(2).values("torch_api_values.one_element", shape=shape)
    assert found == [[], [len(shape)]]


@pytest.mark.parametrize("form", ["a vector", "a number", "a dict", "the output"])
def test_an_evaluation_lists_what_the_loss_function_gives(cluster: Get, form: str) -> None:
    """Only a backward needs a scalar: metrics were refused as losses."""
    assert cluster(2).values("torch_api_values.evaluated", form=form) == [0, 4]


def test_the_pipeline_underneath_takes_plain_pairs(cluster: Get) -> None:
    """It called the script's loss with half of a target."""
    assert cluster(2).values("torch_api_values.pipeline_below") == [0, 3]


@pytest.mark.parametrize(
    ("cls", "verb"),
    [("ScheduleGPipe", "step"), ("Schedule1F1B", "eval"), ("_ScheduleForwardOnly", "step")],
)
def test_forwards_are_run_when_nothing_is_wanted_of_them(cluster: Get, cls: str, verb: str) -> None:
    """return_outputs=False without a loss was refused."""
    found = cluster(2).values("torch_api_values.nothing_wanted", cls=cls, verb=verb)
    assert found == [[None, None], [None, None]]


@pytest.mark.parametrize(("own", "scale_grads"), [(True, True), (True, False), (False, False)])
def test_auxiliary_losses_count_as_torch_counts_them(
    cluster: Get, own: bool, scale_grads: bool
) -> None:
    """As docs/torch_api.md says: by WithLoss, or with gradients that are not divided."""
    cluster(2).values("torch_api_values.auxiliary", own=own, scale_grads=scale_grads)
