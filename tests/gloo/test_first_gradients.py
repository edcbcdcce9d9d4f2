"""A gradient is the parameter's own, or None as in the unsplit model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cluster import Cluster
from jobs.first_gradients import FIRST, PRECISIONS, UNUSED

from npu_pipe.comm.unused import marked, unmarked

Get = Callable[[int], Cluster]

pytestmark = pytest.mark.timeout(60)

LINKS = ["fastest_link", "gloo_link"]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("case", FIRST)
def test_a_gradient_does_not_lie_in_a_buffer(cluster: Get, case: str, name: str, link: str) -> None:
    """Autograd takes a parameter's first gradient as it is, and that may be a view of what the
    backward started with: a received buffer, which the next microbatch filled."""
    for found in cluster(2).values("first_gradients.first", case=case, name=name, link=link):
        assert not found


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "dualpipe"])
@pytest.mark.parametrize("case", UNUSED)
def test_what_the_next_stage_does_not_use_gets_no_gradient(
    cluster: Get, case: str, name: str, link: str
) -> None:
    """It got one of zeros, and an optimizer with weight decay moved what was not trained; where
    the slope was infinite it made NaN of everything before."""
    for found in cluster(2).values("first_gradients.unused", case=case, name=name, link=link):
        assert not found


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_a_gradient_without_values_is_known_by_its_first_number(dtype: torch.dtype) -> None:
    shapes = [(2, 3), (), (1,)]
    without = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    others = [torch.zeros(2, dtype=dtype), torch.full((2,), torch.nan, dtype=dtype)]
    sent = marked([*without, *others, torch.empty(0, dtype=dtype)])
    assert not any(each.is_meta for each in sent)
    came = unmarked([each.clone() for each in sent])
    assert [each.is_meta for each in came] == [True] * 3 + [False] * 3
    assert [each.shape for each in came[:3]] == [torch.Size(shape) for shape in shapes]
